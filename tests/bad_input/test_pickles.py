"""Nothing in the package unpickles, or runs, what may come from outside of the job."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "grpo_mp"
RUNS_DATA = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "numpy.load", "np.load", "marshal.loads"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.safe_load", "shelve.open", "eval", "exec"),
}
# Each of them with the reason why it may: what is read, and by whom it was written.
ALLOWED = {
    "batching/exchange.py: pickle.loads": "samples of another rank, by the job's own process group",
    "checkpoint/torch_dist.py: torch.load": "weights_only",
    "config/other_trainers.py: yaml.safe_load": "shipped with the package",
    "doctor/activations.py: torch.load": "weights_only",
    "policy/checkpoint.py: torch.load": "weights_only",
    "monitor/curves.py: yaml.safe_load": "shipped with the package",
    "monitor/metrics.py: yaml.safe_load": "shipped with the package",
    "monitor/rules.py: yaml.safe_load": "shipped with the package",
    "algorithms/presets.py: yaml.safe_load": "shipped with the package",
    "planner/clusters.py: yaml.safe_load": "shipped with the package",
    "planner/model_configs.py: yaml.safe_load": "shipped with the package",
    "rewards/program_tests.py: exec": "a program of a model, in its sandbox",
    "rewards/program_tests.py: eval": "the entry point of a data row, in the sandbox",
    "rollout/journal.py: pickle.load": "groups that ranks of this run wrote into its folder",
    "rollout/journal.py: pickle.loads": "groups that ranks of this run wrote into its folder",
    "rollout/python_session.py: exec": "code of a model, in its sandbox",
    "rollout/python_session.py: eval": "code of a model, in its sandbox",
}


def calls(file: Path) -> set[str]:
    """The names of RUNS_DATA that a file calls or derives from."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    called += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return {ast.unparse(name) for name in called} & RUNS_DATA


def test_every_use_is_known() -> None:
    found = {f"{file.relative_to(PACKAGE)}: {name}" for file in PACKAGE.rglob("*.py") for name in calls(file)}
    assert found == ALLOWED.keys()


def test_loaders_are_told_that_no_code_may_run() -> None:
    """Without the argument transformers would ask on the terminal. One call runs code, where the setting says so."""
    trusted = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", file
            words = {word.arg: ast.unparse(word.value) for word in node.keywords} if isinstance(node, ast.Call) else {}
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "torch.load":
                assert words["weights_only"] == "True", file
            if called.endswith("AutoTokenizer.from_pretrained") and words["trust_remote_code"] != "False":
                trusted.append(file.name)
    assert trusted == ["tokenizer.py"]
