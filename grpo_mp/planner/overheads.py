"""Numbers that follow from no settings: what libraries take on a device and a host, imbalance, latencies."""

from dataclasses import dataclass

from grpo_mp.planner.clusters import GIB


@dataclass(frozen=True)
class Overheads:
    """Bytes are of one process on one GPU, or of its share of a host."""

    cuda_context: float = 0.6 * GIB  # CUDA, cuBLAS and the kernels' code
    trainer_nccl: float = 4.0 * GIB  # NCCL's buffers of all groups
    engine_nccl: float = 1.0 * GIB
    deepep_buffers: float = 2.5 * GIB  # 1.9 for 128 tokens of 7168 to each of 256 experts, and NVLink's
    cuda_graphs: float = 2.0 * GIB  # static buffers of captured graphs
    fragmentation: float = 0.03  # of what the trainer allocates, held by the caching allocator beside it
    trainer_process: float = 4.0 * GIB
    engine_process: float = 5.0 * GIB
    response_log_std: float = 1.0  # standard deviation of the logarithm of a response's length
    expert_imbalance: float = 1.5  # tokens of the busiest expert rank over the mean
    activation_gradients: float = 0.5  # of the activations that one layer holds
    mem_fraction_static: float = 0.8  # where engine.args do not say
    decode_collective_s: float = 20e-6  # one small collective while decoding
    decode_layer_s: float = 60e-6  # kernel launches of one layer while decoding
    sync_request_s: float = 0.05  # one request to an engine


OVERHEADS = Overheads()
