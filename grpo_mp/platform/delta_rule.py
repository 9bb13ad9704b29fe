"""The gated delta rule (arXiv 2412.06464) on a CPU, for the policy's and an engine's layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # most tokens of a chunk
L2_NORM_EPS = 1e-6  # flash-linear-attention's


def unit_heads(x: Tensor, value_heads: int) -> Tensor:
    """Scale heads [..., HK, K] to length 1 and repeat them for the value heads, [..., HV, K]."""
    heads = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
    return heads.repeat_interleave(value_heads // x.shape[-2], dim=-2)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """Return the outputs [n, L, HV, V] of n sequences that start from an empty state.

    `query`, `key`: [n, L, HV, K]; `value`: [n, L, HV, V]; `log_decay`, `strength`: [n, L, HV]. Equation 10, written for
    chunks: what the tokens of a chunk write solves one triangular system, and states pass from chunk to chunk.
    """
    length = value.shape[1]
    width = value.shape[-1]
    count = -(-length // CHUNK)
    size = -(-length // count)

    def chunks(x: Tensor) -> Tensor:  # [n, L, HV, D] -> [count, n, HV, size, D]
        padded = F.pad(x.float(), (0, 0, 0, 0, 0, count * size - length))
        return padded.unflatten(1, (count, size)).permute(1, 0, 3, 2, 4)

    queries = chunks(query * query.shape[-1] ** -0.5)
    keys = chunks(key)
    values = chunks(value)
    strengths = chunks(strength[..., None])
    decays = chunks(log_decay[..., None]).cumsum(-2)
    last = decays[..., -1:, :]
    between = (decays - decays.mT).tril().exp().tril()  # from the token of a column to that of a row
    system = (keys * strengths @ keys.mT * between).tril(-1)
    inputs = torch.cat([values, keys * decays.exp()], -1) * strengths
    solved = torch.linalg.solve_triangular(system, inputs, upper=False, unitriangular=True)
    attended = queries @ keys.mT * between
    state = values.new_zeros(*keys.shape[1:3], keys.shape[-1], width)
    outputs = []
    for i in range(count):
        written = solved[i, ..., :width] - solved[i, ..., width:] @ state
        outputs.append((queries[i] * decays[i].exp()) @ state + attended[i] @ written)
        state = state * last[i].exp() + (keys[i] * (last[i] - decays[i]).exp()).mT @ written
    return torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length].to(value.dtype)
