"""The trainer, with one expert's weights spoiled on their first way into the engines. Run under torchrun."""

from grpo_mp.train import main
from grpo_mp.weight_sync.reshard import NamedTensors
from grpo_mp.weight_sync.transport import HostTransport

SPOILED = "model.layers.1.mlp.experts.3.down_proj.weight"
send = HostTransport.send
seen: list[str] = []


async def send_spoiled(transport: HostTransport, bucket: NamedTensors) -> None:
    for place, (name, tensor) in enumerate(bucket):
        if name == SPOILED and not seen:
            seen.append(name)
            bucket[place] = (name, tensor * 1.5)  # not in place: it may be the policy's own
    await send(transport, bucket)


if __name__ == "__main__":
    HostTransport.send = send_spoiled  # type: ignore[method-assign]
    main()
