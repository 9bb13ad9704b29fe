"""Everything a user can get wrong before a process group exists: one sentence, status 2, nothing written."""

import json
import re
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_mp.config import load_settings
from grpo_mp.planner.model_configs import published_config
from grpo_mp.train import main
from grpo_mp.trainer.command_line import started_job
from grpo_mp.trainer.preflight import check_bucket, check_engine
from grpo_mp.utils.errors import UserError
from tests.conftest import TinyRun
from tests.planner.jobs import settings_of
from tests.trainer.conftest import Refuse


@pytest.fixture
def model(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "model"))


def write_index(model: Path, file: str) -> None:
    names = load_file(model / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.group_sise=4", "unknown setting rollout.group_sise (did you mean rollout.group_size?)"),
        ("sync.transport=ipc", "sync.transport=ipc needs CUDA, and this machine computes on its CPU: set auto or host"),
        ("algoritm.preset=grpo", "unknown setting algoritm (did you mean algorithm?)"),
        ("algorithm.kl.ceof=1", "unknown setting algorithm.kl.ceof (did you mean algorithm.kl.coef?)"),
        ("rollout.group_size=many", "rollout.group_size: expected an integer, found 'many'"),
        ("training.updates_per_step=3", "training.updates_per_step=3 does not divide the 16 samples of a step"),
        ("sync.bucket_bytes=4KiB", "a quarter of it is a round of the weight sync, and decoder.layers.0.mlp"),
        ("sync.bucket_bytes=1TB", "sync.bucket_bytes: '1TB' is not a number of bytes"),
        ("engine.args={mem_fraction: 0.5}", "engine.args.mem_fraction: the installed SGLang has no such argument (did"),
        ("engine.args={port: 1}", "engine.args.port cannot be set: free ports are chosen at start"),
        (
            "engine.num_engines=3",
            "engine.num_engines=3 engines of engine.gpus_per_engine=1 do not fit the 2 ranks of this job",
        ),
        (
            "training.megatron_args={moe_aux_loss_coef: 1}",
            "training.megatron_args.moe_aux_loss_coef: no field of Megatron's",
        ),
        (
            "training.megatron_args={use_distributed_optimizer: false}",
            "training.megatron_args.use_distributed_optimizer cannot be set: a checkpoint that any layout loads",
        ),
        (
            "training.megatron_args={recompute_granularity: rarely}",
            "training.megatron_args.recompute_granularity='rarely': give 'full' or 'selective'",
        ),
        (
            "training={router_replay: R3, megatron_args: {moe_router_fusion: true}}",
            "training.megatron_args.moe_router_fusion: these routers ignore replayed experts: leave it out, or set",
        ),
        (
            "training.megatron_args={moe_enable_routing_replay: true}",
            "training.megatron_args.moe_enable_routing_replay cannot be set: set training.router_replay",
        ),
        (
            "engine.args={enable_return_routed_experts: true}",
            "engine.args.enable_return_routed_experts cannot be set: set training.router_replay=R3",
        ),
        (
            "training={router_replay: R2, updates_per_step: 1}",
            "training.router_replay=R2 replays the experts of the old-logprob pass, which this run does not make",
        ),
        ("rollout.max_response_tokens=4000", "= 4064, but the model has only 1024 positions"),
        (
            "monitor.guards={train/entropi: {min: 0.1}}",
            "metric 'train/entropi' is not in grpo_mp.monitor.metrics.TABLE (did you mean train/entropy?)",
        ),
        ("monitor.guards={reward/mean: {steps: 3}}", "set one of min, max and max_drop"),
        (
            "data.eval.arithmetic.max_response_tokens=4000",
            "rollout.max_prompt_tokens + data.eval.arithmetic.max_response_tokens = 4064, but the model has only 1024",
        ),
    ],
)
def test_settings(refuse: Refuse, override: str, sentence: str) -> None:
    assert sentence in refuse(override)


def test_a_settings_file_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    assert "none.yaml: No such file or directory: give an existing file" in refuse(config=tmp_path / "none.yaml")


def test_a_misspelt_option(refuse: Refuse) -> None:
    assert "unrecognized arguments: --dryrun" in refuse("--dryrun")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--ranks", "2"],
            "--ranks 2, but no launcher started others: WORLD_SIZE=1: start 2, or omit --ranks",
        ),
        (["--ranks-per-node", "2"], "--ranks-per-node is for --dry-run: a launcher says how many ranks a node has"),
    ],
)
def test_ranks_that_were_not_started(
    options: list[str], sentence: str, tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main([str(tiny_run.config), *options])
    assert (raised.value.code, capfd.readouterr().err) == (2, f"error: {sentence}\n")


def test_ranks_of_an_environment_are_refused_by_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"--ranks 2, but the environment has RANK and WORLD_SIZE=8: .* or unset both"):
        started_job(2).__enter__()


@pytest.mark.parametrize(("run", "refused"), [({"export": False}, False), ({"export": True}, True)])
def test_a_round_holds_what_an_export_moves_at_once(run: dict[str, bool], refused: bool) -> None:
    """Engines of a Mixtral-8x22B in FP8: its experts' three matrices are half of what they are in the export."""
    settings = settings_of(run=run | {"export_fp8": False}, sync={"bucket_bytes": 1_572_864_000})
    hf = published_config("mixtral-8x22b")
    with pytest.raises(UserError, match="set 2415919104 or more") if refused else nullcontext():
        check_bucket(settings, hf, fp8=True)


def test_no_reward_at_all(refuse: Refuse) -> None:
    assert "no reward has a weight: set reward.answer, " in refuse("reward.answer=0", "reward.boxed=0")


@pytest.mark.parametrize(
    ("model", "gpus", "args", "sentence"),
    [
        (
            "moonlight-16b-a3b",
            4,
            {"quantization": "fp8", "ep_size": 4, "attn_dp_size": 4},
            "engine.args.quantization=fp8: model.layers.1.mlp.shared_experts.gate_proj.weight has 2816 rows, over "
            "4 GPU(s) (engine.gpus_per_engine) 704 each, which is no multiple of the 128 of an FP8 block: the nearest "
            "valid "
            "setting is engine.gpus_per_engine=2, engine.args.attn_dp_size=2, engine.args.ep_size=2",
        ),
        (
            "glm-4.5-air",
            8,
            {"quantization": "fp8", "ep_size": 8, "attn_dp_size": 2},
            "engine.args.quantization=fp8: model.layers.0.mlp.gate_proj.weight has 10944 rows, over 8 GPU(s) "
            "(engine.args.moe_dense_tp_size, else engine.gpus_per_engine) 1368 each, which is no multiple of the 128 "
            "of an FP8 "
            "block: no smaller division of this model fits either: leave engine.args.quantization out",
        ),
        (
            "qwen3-30b-a3b",
            4,
            {"ep_size": 3},
            "engine.args.ep_size: 3 does not divide 4, the engine.gpus_per_engine: the nearest is 2",
        ),
        (
            "qwen3-30b-a3b",
            4,
            {"dp_size": 2},
            "engine.args.dp_size=2 would start full replicas of the engine on other GPUs",
        ),
    ],
)
def test_an_engine_on_gpus_that_do_not_divide_the_model(
    model: str, gpus: int, args: dict[str, Any], sentence: str
) -> None:
    settings = settings_of(engine={"gpus_per_engine": gpus, "args": args})
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        check_engine(settings.engine, published_config(model), cpu=False)


@pytest.mark.parametrize(
    ("layout", "ranks", "rule", "nearest"),
    [
        ("expert=3", 2, "expert_tensor x expert x pipeline = 3 does not divide the 2 ranks", "expert=2"),
        ("tensor=8", 8, "tensor=8 does not divide the 4 attention heads", "tensor=4"),
        ("pipeline=4", 8, "pipeline x virtual_pipeline = 4 does not divide the 2 layers", "pipeline=2"),
        ("virtual_pipeline=2", 2, "virtual_pipeline needs pipeline > 1", "pipeline=1"),
        ("expert=16", 16, "expert=16 does not divide the 8 experts", "expert=8"),
    ],
)
def test_an_impossible_layout(refuse: Refuse, layout: str, ranks: int, rule: str, nearest: str) -> None:
    message = refuse(f"layout.{layout}", ranks=ranks)
    assert message.startswith(f"layout: {rule}; ")
    assert nearest in message.partition("the nearest valid layout is ")[2]


# -- checkpoint and tokenizer --------------------------------------------------------------------------------


def test_a_model_folder_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    refused = refuse(f"model.path={tmp_path / 'none'}")
    assert f"(hf download OWNER/NAME --local-dir {tmp_path / 'none'})" in refused
    assert "(hf download owner/name --local-dir checkpoints/name)" in refuse("model.path=owner/name")


def test_a_config_that_is_cut_short(refuse: Refuse, model: Path) -> None:
    (model / "config.json").write_text((model / "config.json").read_text()[:50])
    assert "config.json: not valid JSON" in refuse(f"model.path={model}")


def test_a_safetensors_file_that_is_cut_short(refuse: Refuse, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refuse(f"model.path={model}")
    assert message.startswith(f"{file} is damaged or not a safetensors file")
    assert message.endswith("copy it again")


def test_no_weights_at_all(refuse: Refuse, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "contains neither model.safetensors nor model.safetensors.index.json" in refuse(f"model.path={model}")


def test_an_index_that_names_an_absent_file(refuse: Refuse, model: Path) -> None:
    write_index(model, "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors is missing: the index names it" in refuse(f"model.path={model}")


def test_an_index_that_is_cut_short(refuse: Refuse, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {')
    assert "model.safetensors.index.json: not valid JSON" in refuse(f"model.path={model}")


def test_missing_tensors(refuse: Refuse, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    lost = "model.layers.1.mlp.gate.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, model / "model.safetensors")
    assert f"1 tensors are missing, the first is {lost}" in refuse(f"model.path={model}")


def test_a_tensor_of_another_shape(refuse: Refuse, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"][:-1]}, model / "model.safetensors")
    assert "tensor model.norm.weight has shape [63], config.json says [64]" in refuse(f"model.path={model}")


def test_an_architecture_that_is_not_supported(refuse: Refuse, model: Path) -> None:
    change_json(model / "config.json", model_type="gpt2")
    assert "model_type 'gpt2' is not supported" in refuse(f"model.path={model}")


def test_a_tokenizer_without_chat_template(refuse: Refuse, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "the tokenizer has no chat template: add chat_template.jinja" in refuse(f"model.path={model}")


def test_a_folder_without_tokenizer(refuse: Refuse, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "the tokenizer cannot be read" in refuse(f"model.path={model}")


def test_a_tokenizer_that_is_cut_short(refuse: Refuse, model: Path) -> None:
    file = model / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    assert f"{model}: the tokenizer cannot be read" in refuse(f"model.path={model}")


def test_a_chat_template_that_is_none(refuse: Refuse, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in %}")
    assert "the tokenizer's chat template refuses the prompt" in refuse(f"model.path={model}")


def test_a_tokenizer_of_another_model(refuse: Refuse, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    rows = {name: tensors[name][:16].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | rows, model / "model.safetensors")
    change_json(model / "config.json", vocab_size=16)
    assert "config.json says vocab_size 16: use the tokenizer of this model" in refuse(f"model.path={model}")


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# -- data and rewards ----------------------------------------------------------------------------------------

GOOD_ROW = '{"question": "Tom has 3 eggs.", "answer": "3"}\n'


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (GOOD_ROW + "\n" + GOOD_ROW, "train.jsonl, line 2: empty row: remove it"),
        (GOOD_ROW * 2 + '{"question": "Tom', "train.jsonl, line 3: not valid JSON"),
        (GOOD_ROW + "[1]\n", "train.jsonl, line 2: expected an object with columns, found list"),
        (
            '{"prompt": "x", "answer": "1"}\n',
            "train.jsonl, line 1: no column question, the row has: prompt, answer: set",
        ),
        ('{"question": "x"}\n', "train.jsonl, line 1: no column answer, the row has: question: set data.answer_column"),
        ("", "train.jsonl: no rows: give a file with at least one prompt"),
        (GOOD_ROW, "1 prompts fit, a step takes rollout.prompts_per_step=4"),
    ],
)
def test_data(refuse: Refuse, tmp_path: Path, rows: str, sentence: str) -> None:
    (tmp_path / "train.jsonl").write_text(rows)
    assert sentence in refuse(f"data.train={tmp_path / 'train.jsonl'}")


@pytest.mark.parametrize("option", ["data.train", "data.eval.arithmetic"])
def test_rows_that_a_reward_cannot_score(refuse: Refuse, tmp_path: Path, option: str) -> None:
    complete = GOOD_ROW.replace("}", ', "level": 1, "tests": "assert f"}') * 4
    (tmp_path / "good.jsonl").write_text(complete)
    (tmp_path / "rows.jsonl").write_text(complete + GOOD_ROW)
    (tmp_path / "reward.py").write_text("def level(completions, level, **columns): return [1.0] * len(completions)")
    files = f"data.train={tmp_path / 'good.jsonl'}", f"{option}={tmp_path / 'rows.jsonl'}"
    location = f"{tmp_path / 'rows.jsonl'}, line 5:"
    assert f"{location} no column tests, the row has: question, answer" in refuse(*files, "reward.code={}")
    function = f"reward.functions={{{tmp_path / 'reward.py'}:level: 1.0}}"
    assert f"{location} reward level has the parameter level, and the row no such column" in refuse(*files, function)


def test_prompts_that_are_all_too_long(refuse: Refuse) -> None:
    assert "all 60 prompts are longer than rollout.max_prompt_tokens=4" in refuse("rollout.max_prompt_tokens=4")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("no_such_module:f", "importing no_such_module failed: ModuleNotFoundError"),
        ("json:laods", "json has no laods (did you mean loads?)"),
        ("nowhere/reward.py:f", "no such file: nowhere/reward.py"),
        ("reward", "write module:function or path/file.py:function"),
    ],
)
def test_a_reward_that_cannot_be_imported(refuse: Refuse, spec: str, sentence: str) -> None:
    assert sentence in refuse(f"reward.functions={{'{spec}': 1.0}}")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "algorithm.policy_loss=clp",
            "algorithm.policy_loss: unknown policy loss 'clp' (did you mean clip?): there are",
        ),
        ("algorithm.policy_loss=own.py:f", "algorithm.policy_loss 'own.py:f': no such file: own.py"),
        (
            "algorithm.policy_loss_args={x: 1}",
            "algorithm.policy_loss 'clip': as policy loss it is called with (terms,",
        ),
        (
            "algorithm.advantage.estimator=json:loads",
            "as advantage estimator it is called with (samples, advantage, weights)",
        ),
        ("algorithm.advantage.estimator=process", "'process' is no advantage estimator: write module:function"),
        ("algorithm.filter.metric=acuracy", "unknown group filter 'acuracy' (did you mean accuracy?)"),
        ("data.source=parket", "data.source: unknown data source 'parket' (did you mean parquet?)"),
        (
            "monitor.loggers=[jsonl, tensorbord]",
            "monitor.loggers: unknown logger 'tensorbord' (did you mean ",
        ),
        ("model.family=deepseekv3", "model.family: unknown model family 'deepseekv3' (did you mean deepseek_v3?)"),
        (
            "model.family=json:loads",
            "model.family 'json:loads': as model family it must be a grpo_mp.models.",
        ),
        ("rollout.function=json:loads", "rollout.function 'json:loads': as rollout function it is called with (task, "),
        ("rollout.function=operator:eq", "'operator:eq': it must be a coroutine function: async def rollout(task, "),
        ("reward.functions={'os.path:join': 1}", "as reward function it is called with (prompts=, completions=, "),
    ],
)
def test_an_extension_that_is_not_there_or_does_not_fit(refuse: Refuse, override: str, sentence: str) -> None:
    assert sentence in refuse(override)


def test_tools_that_do_not_fit(refuse: Refuse) -> None:
    calculator, parser = "rollout.tools=['tools.tiny.calculator:calculator']", "rollout.tool_parser=qwen26"
    assert f"{parser}: the installed SGLang has no such parser (did you mean qwen25?)" in refuse(calculator, parser)
    assert "'json:loads': a tool needs type hints" in refuse(
        "rollout.tools=['json:loads']", "rollout.tool_parser=qwen25"
    )


# -- what holds where all is well ----------------------------------------------------------------------------


def test_a_dry_run_says_what_would_run_and_writes_nothing(
    tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start = [str(tiny_run.config), f"run.folder={run}", "--dry-run", "--ranks", "4", "layout.tensor=2"]
    main([*start, "--all"])
    out, err = capfd.readouterr()
    facts, _, settings = out.partition("\n\n")
    (tmp_path / "resolved.yaml").write_text(settings)
    assert load_settings(tmp_path / "resolved.yaml") == load_settings(
        tiny_run.config, [f"run.folder={run}", "layout.tensor=2"]
    )
    main(start)
    changed = capfd.readouterr().out.partition("\n\n")[2]
    assert "  tensor: 2\n" in changed
    assert "virtual_pipeline" in settings
    assert "virtual_pipeline" not in changed
    assert (
        "ranks: 4, 4 on each node; layout: tensor=2, pipeline=1, context=1, expert=2, expert_tensor=1, data=2" in facts
    )
    assert "engines: 4 x 1 rank(s), hosted by ranks (0, 1, 2, 3)" in facts
    assert "train prompts: 60 (0 longer than the limit left out); eval: 6 of arithmetic" in facts
    assert "a step: 4 prompts x 4 = 16 samples, 2 updates of 8" in facts
    assert "are also in data.train" not in facts
    assert "first prompt, as the policy reads it: '<|user|>" in facts
    assert "nothing was started" in facts
    assert err == ""
    assert not run.exists()


# -- the job's own port --------------------------------------------------------------------------------------


def test_a_port_that_is_taken(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as raised:
            main([str(tiny_run.config), f"run.folder={tmp_path / 'run'}", "layout.expert=2"])
    assert raised.value.code == 2
    assert f"error: MASTER_PORT={port} of 127.0.0.1 is taken" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
