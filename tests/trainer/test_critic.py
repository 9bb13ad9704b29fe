"""PPO's critic on one rank: where its weights come from, what it is refused for, where it is saved and moved."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import pack
from grpo_mp.checkpoint.run_state import TrainState, latest_checkpoint
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.models.value_head import VALUE_HEAD
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.engine_memory import engine_memory
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import SubPhase, device_memory
from grpo_mp.policy.critic import Critic, check_critic
from grpo_mp.policy.offload import PolicyOffloader, device_items
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.job import build_critic
from grpo_mp.trainer.offload import offload_functions
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Residency
from grpo_mp.utils.types import MicroBatch, Sample
from tests.planner.jobs import BASE
from tests.reward_models import change_weights, expected_scores, make_reward_model
from tests.trainer.test_offload import NO_ENGINE
from tools.tiny.models import make_tiny, make_tokenizer

SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": None, "max_position_embeddings": 256},
}
SEQUENCES = ((3, 5, 7, 9), (11,), (2, 4, 6))
SHORT = {"max_prompt_tokens": 8, "max_response_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tiny(folder, "llama", make_tokenizer(["apples"]), **SHAPE)
    return folder


def settings_with(model: Path, critic: dict[str, Any] | None, **changes: Any) -> Settings:
    tree = BASE | {"model": {"path": str(model), "dtype": "float32"}, "rollout": BASE["rollout"] | SHORT}
    return check_settings(tree | {"algorithm": "ppo", "critic": critic} | changes, "test")


def packed(sequences: tuple[tuple[int, ...], ...]) -> MicroBatch:
    """Each as the prompt of one response token, whose state is all of it."""
    samples = [Sample.from_tokens(i, tokens, (1,)) for i, tokens in enumerate(sequences)]
    ((plan,),) = plan_microbatches([sample.total_tokens for sample in samples], 1, 1000, align=4).ranks
    return pack(samples, [0.0] * len(samples), [1.0] * len(samples), plan, align=4)


def values_of(critic: Critic, batch: MicroBatch) -> list[float]:
    (values,) = critic.values([batch])
    order = torch.tensor(batch.sample_ids).argsort()
    found: list[float] = values[batch.mask.bool()][order].tolist()
    return found


def test_a_policy_becomes_a_critic_with_a_head_of_zeros(parallel: Parallel, model: Path) -> None:
    critic = Critic(settings_with(model, {}).for_critic(), parallel)
    policy = make_policy(model, parallel)
    assert values_of(critic, packed(SEQUENCES)) == [0.0] * len(SEQUENCES)
    assert critic.tensors.keys() == policy.tensors.keys()
    different = [name for name, tensor in critic.tensors.items() if not tensor.equal(policy.tensors[name])]
    assert different == [VALUE_HEAD]
    assert critic.tensors[VALUE_HEAD].shape == (1, SHAPE["hidden_size"])


def make_policy(model: Path, parallel: Parallel) -> Policy:
    return Policy(settings_with(model, {}), parallel, with_reference=False)


def make_headless(folder: Path, model: Path) -> None:
    """Make a reward model without its head."""
    make_reward_model(folder, model)
    change_weights(folder, remove=["score.weight"])


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


WRONG = {
    "its vocab_size is 77, the policy's": partial(change_config, vocab_size=77),
    "1 tensors are missing, the first is model.norm.weight": partial(change_weights, remove=["model.norm.weight"]),
    # As of TRL's value model, which would not be read.
    "does not know the tensor v_head.summary.weight": partial(
        change_weights, add={"v_head.summary.weight": torch.ones(1, 64)}
    ),
}
WRONG_REWARD_MODELS = {
    "score.weight has shape [2, 64], config.json says [1, 64]": partial(make_reward_model, labels=2),
    "1 tensors are missing, the first is score.weight": make_headless,
}


@pytest.mark.parametrize("sentence", [*WRONG, *WRONG_REWARD_MODELS])
def test_a_critic_of_another_model_is_refused(model: Path, tmp_path: Path, sentence: str) -> None:
    folder = tmp_path / "critic"
    if sentence in WRONG:
        shutil.copytree(model, folder)
        WRONG[sentence](folder)
    else:
        WRONG_REWARD_MODELS[sentence](folder, model)
    settings = settings_with(model, {"path": str(folder)})
    with pytest.raises(UserError) as refused:
        check_critic(settings.for_critic(), settings.model.read_config(), 1)
    assert sentence in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_critic_of_another_family_and_size_gives_its_own_scores(
    parallel: Parallel, model: Path, tmp_path: Path
) -> None:
    """A dense reward model beside a policy of experts."""
    policy = tmp_path / "policy"
    reward = tmp_path / "reward"
    make_tiny(policy, "qwen3_moe", make_tokenizer(["apples"]), num_hidden_layers=3, hidden_size=32)
    make_reward_model(reward, policy)
    settings = settings_with(policy, {"path": str(reward)})
    check_critic(settings.for_critic(), settings.model.read_config(), 1)
    values = values_of(Critic(settings.for_critic(), parallel), packed(SEQUENCES))
    assert values == pytest.approx(expected_scores(reward, SEQUENCES), rel=1e-5)
    assert len({round(value, 3) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": "grpo"}, "critic trains a value model, and algorithm.advantage.baseline=group_mean takes none"),
        ({"critic": None}, "takes the values of a critic, and critic is null: set it"),
        ({"critic": {"warmup_steps": 3}}, "critic.warmup_steps=3 leaves none of 3 steps to the policy: lower it"),
        ({"algorithm": {"preset": "ppo", "advantage": {"scale": "batch_std"}}}, "set advantage.scale=none"),
        ({"algorithm": {"preset": "ppo", "ratio": "sequence"}}, "differs by token, ratio=sequence does not"),
        ({"algorithm": {"preset": "ppo", "filter": {"zero_std": "drop"}}}, "filter.zero_std looks at groups"),
        ({"algorithm": {"gamma": 0.9}, "critic": None}, "gamma and lam belong to a critic's advantages"),
    ],
)
def test_settings_that_do_not_fit_a_critic_are_refused(model: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_with(model, **({"critic": {}} | changes))
    assert sentence in str(refused.value)


def test_the_policy_s_schedule_has_the_updates_after_the_warm_up(model: Path) -> None:
    settings = settings_with(model, {"warmup_steps": 1, "lr": 0.5}, training={"updates_per_step": 4})
    assert (settings.total_updates, settings.for_critic().total_updates) == (8, 12)
    assert settings.for_critic().optimizer.lr == 0.5
    indexers = settings.training.model_copy(update={"megatron_args": {INDEXER_LOSS: 0.1, "bucket_size": 5000}})
    of_critic = settings.model_copy(update={"training": indexers}).for_critic().training.megatron_args
    assert of_critic == {"bucket_size": 5000}  # they learn from the attention of the policy
    assert settings_with(model, {}).for_critic().model.path == model
    one = settings_with(model, {}, rollout=BASE["rollout"] | {"group_size": 1})
    assert one.rollout.group_size == 1


def learned(critic: Critic) -> Critic:
    batch = packed(SEQUENCES)
    returns = torch.linspace(-1, 1, batch.total_tokens, dtype=torch.float64)
    critic.update([replace(batch, values=torch.zeros(batch.total_tokens), returns=returns)], make_value_loss(10.0))
    return critic


def test_a_critic_is_saved_with_the_policy_and_built_from_it(parallel: Parallel, model: Path, tmp_path: Path) -> None:
    settings = settings_with(model, {"lr": 0.1}, run={"folder": str(tmp_path), "steps": 3})
    policy = Policy(settings, parallel, with_reference=False)
    critic = learned(Critic(settings.for_critic(), parallel))
    with CheckpointSaver(settings.run, policy, 60.0, critic=critic) as saver:
        saver.save(TrainState(step=1))
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    built = build_critic(settings.for_critic(), parallel, folder)
    fresh = Critic(settings.for_critic(), parallel)
    assert not fresh.tensors[VALUE_HEAD].equal(critic.tensors[VALUE_HEAD])
    for one, other in ((built, critic), (learned(built), learned(critic))):  # the optimizer's state, too
        assert [name for name in one.tensors if not one.tensors[name].equal(other.tensors[name])] == []
    check_replicas(built, 1, every=1)


def test_a_critic_holds_what_the_plan_says(parallel: Parallel, model: Path) -> None:
    """Of what is built: buffers of weights and gradients, Adam's state; a buffer is padded at its end."""
    settings = settings_with(model, {})
    job = make_job(settings, settings.model.read_config(), read_cluster("h100-80"), 1, gpus_per_node=1)
    items = device_items(Critic(settings.for_critic(), parallel))
    planned = device_memory(job, 0, engine_memory(job))[SubPhase.TRAIN]
    for kind in ("weights", "gradients", "optimizer"):
        assert items[kind] == pytest.approx(planned[f"critic {kind}"], rel=0.01)
    both = device_items(make_policy(model, parallel), Critic(settings.for_critic(), parallel))
    for kind in ("weights", "gradients", "optimizer"):
        assert both[kind] == pytest.approx(planned[kind] + planned[f"critic {kind}"], rel=0.01)


def test_a_critic_goes_where_the_policy_goes(parallel: Parallel, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, str, bool]] = []
    monkeypatch.setattr(
        PolicyOffloader, "move", lambda self, part, onload: moved.append((type(self._policy).__name__, part, onload))
    )
    policy = make_policy(model, parallel)
    critic = Critic(settings_with(model, {}).for_critic(), parallel)
    for moves in (True, False):
        functions = offload_functions(policy, NO_ENGINE, moves, None, critic)
        for part in vars(Residency()):
            functions[part](moves)
    models = ("Policy", "Critic")
    stays = ("policy_weights", "gradients")
    expected = [(name, part, True) for part in (*stays, "optimizer") for name in models]
    assert moved == [*expected, *((name, part, False) for part in stays for name in models)]
