"""The trainer, with one expert's weights corrupted on their first way into the engines. Run under torchrun."""

from grpo_mp.train import main
from grpo_mp.weight_sync.reshard import NamedTensors
from grpo_mp.weight_sync.transport import HostTransport

CORRUPT = "model.layers.1.mlp.experts.3.down_proj.weight"
send = HostTransport.send
seen: list[str] = []


async def send_corrupt(transport: HostTransport, bucket: NamedTensors) -> None:
    for place, (name, tensor) in enumerate(bucket):
        if name == CORRUPT and not seen:
            seen.append(name)
            bucket[place] = (name, tensor * 1.5)  # not in place: it may be the policy's own
    await send(transport, bucket)


if __name__ == "__main__":
    HostTransport.send = send_corrupt  # type: ignore[method-assign]
    main()
