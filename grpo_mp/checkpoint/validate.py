"""Do the tensors of a folder belong to the model that its config describes?"""

from collections.abc import Iterable

from grpo_mp.checkpoint.hf_reader import Weights
from grpo_mp.errors import UserError
from grpo_mp.models.mapping import Param


def check_tensors(reader: Weights, params: Iterable[Param]) -> None:
    """Raise UserError where a tensor of the model is missing or has another shape than the config says."""
    shapes = {name: shape for param in params for name, shape in zip(param.hf, param.shapes, strict=True)}
    missing = shapes.keys() - reader.names
    if missing:
        raise UserError(f"{reader.folder}: {len(missing)} tensors are missing, the first is {min(missing)}")
    for name, shape in shapes.items():
        check_shape(reader, name, shape)


def check_shape(reader: Weights, name: str, shape: tuple[int, ...]) -> None:
    """The same of one tensor that is there."""
    found = reader.shape(name)
    if found != shape:
        raise UserError(f"{reader.folder}: tensor {name} has shape {list(found)}, config.json says {list(shape)}")
