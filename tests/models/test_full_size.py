"""Published models at full size, on the meta device, in the layouts of configs/ and some more.

The ranks of one replica have every tensor of the files exactly once.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.coordinates import coordinates, tp_size
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.planner.model_configs import find_config
from grpo_mp.policy.weights import local_tensors
from tests.models.published import PUBLISHED
from tests.planner.jobs import settings_of
from tests.planner.meta_model import built_on_meta
from tests.recipes import FULL_SIZE
from tests.sparse_attention import is_sparse, needs_megatron

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = [pytest.param(path.stem, marks=[needs_megatron] * is_sparse(path)) for path in FULL_SIZE]
FREE = "pipeline_model_parallel_layout"
KIMI = {"num_layers_in_first_pipeline_stage": 13, "num_layers_in_last_pipeline_stage": 16}
OTHERS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {  # where configs/ has no recipe
    "kimi-k2": ({"tensor": 8, "pipeline": 4, "expert": 64}, KIMI),
    "glm-4.5": ({"tensor": 4, "pipeline": 4, "expert": 16}, {FREE: "Et*23|t*23|t*23|t*23L"}),
    "mixtral-8x22b": ({"tensor": 4, "pipeline": 4, "virtual_pipeline": 2, "expert": 8, "expert_tensor": 1}, {}),
    "deepseek-v2": ({"tensor": 4, "pipeline": 4, "expert": 32, "expert_tensor": 2}, {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_of_recipes(recipe: str) -> None:
    settings = load_settings(CONFIGS / f"{recipe}.yaml")
    check_tensors(settings, find_config(settings.model.path)[0])


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts(name: str) -> None:
    sizes, megatron = OTHERS[name]
    check_tensors(
        settings_of(layout=sizes, training={"megatron_args": megatron}), HfConfig(Path(name), PUBLISHED[name][0])
    )


def check_tensors(settings: Settings, hf: HfConfig) -> None:
    params = family_of(hf).params(hf)
    expected = Counter(name for param in params.values() if not param.alias for name in param.hf)
    assert set(expected.values()) == {1}
    last = settings.layout.tensor - 1  # all tensor-parallel ranks have the same names
    names = Counter(name for stage in stage_names(settings, hf, last, params) for name in stage)
    one_stage = settings.layout.pipeline == 1  # the output layer of tied embeddings is the embedding itself
    assert names.keys() == {name for name, param in params.items() if not (one_stage and param.alias)}
    assert set(names.values()) == {1}
    assert Counter(name for param in names if not params[param].alias for name in params[param].hf) == expected


def stage_names(settings: Settings, hf: HfConfig, tp_rank: int, params: dict[str, Param]) -> list[set[str]]:
    """Names of parameters on each pipeline stage: of one tensor-parallel rank and all expert-parallel ranks."""
    layout = settings.layout
    per_stage = max(layout.tensor * layout.context, layout.expert_tensor * layout.expert)
    stages = []
    for first in range(0, per_stage * layout.pipeline, per_stage):
        coords = coordinates(first + tp_rank, layout, per_stage * layout.pipeline)
        names: Counter[str] = Counter()
        with built_on_meta(settings, hf, per_stage * layout.pipeline, first + tp_rank) as chunks:
            for expert in range(layout.expert):
                tensors = local_tensors(chunks, params, replace(coords, expert=expert), layout.expert)
                for name, local in tensors.items():
                    assert tuple(local.shape) == params[name].local_shape(tp_size(params[name], layout)), name
                names.update(name for name in tensors if expert == 0 or params[name].expert is not None)
        assert set(names.values()) == {1}
        stages.append(set(names))
    return stages
