"""Expected, and not shown yet by a committed result file: the checksum of a payload (xxh3) costs less than a sixth of
zlib's crc32, and less than 8 % of what sending the same bytes to another rank of the machine and receiving them there
costs each of the two, for 1 MB and 16 MB.

    python benchmarks/checksum_cost.py [--repeats 7] [--steps 8]

Every block of a message is summed once by its sender and once by its receiver, on the threads that carry it. What the
way costs is CPU time of both ranks with all their threads, checksums included, as `unlatch.throughput` measures it.
`adler32` is the other checksum that comes with Python. The sum of the words by torch needs no further package either,
but does not notice words that changed places.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import xxhash
from common import interleave, options, spread, write

import unlatch
from unlatch.throughput import Courier

SIZES = {"1 MB": 2**20, "16 MB": 2**24}
CHOSEN, BASE = "xxh3", "crc32"
CHECKSUMS: dict[str, Callable[[torch.Tensor], int]] = {
    BASE: lambda block: zlib.crc32(block.numpy().data),
    "adler32": lambda block: zlib.adler32(block.numpy().data),
    CHOSEN: lambda block: xxhash.xxh3_64_intdigest(block.numpy().data),
    "sum of words": lambda block: int(block.view(torch.int64).sum()),
}


def seconds(checksum: Callable[[torch.Tensor], int], block: torch.Tensor, steps: int) -> float:
    """CPU seconds for one block."""
    start = time.process_time()
    for _ in range(steps):
        checksum(block)
    return (time.process_time() - start) / steps


def travel(size: int, repeats: int) -> list[float]:
    """CPU seconds that each end of a link takes for one message, round by round; on a rank."""
    courier = Courier("gloo")
    return [courier.cost(size)[0] for _ in range(repeats)]


def main() -> None:
    parser = options(__doc__, repeats=7, steps=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        block = torch.randint(256, (size,), dtype=torch.uint8)
        steps = asked.steps * max(1, 2**24 // size)
        candidates = {n: partial(seconds, checksum, block, steps) for n, checksum in CHECKSUMS.items()}
        times = interleave(candidates, asked.repeats)
        ends = unlatch.launch(travel, 2, args=(size, asked.repeats))
        way = [sum(both) / 2 for both in zip(*ends, strict=True)]
        row: dict[str, Any] = {n: spread(t) for n, t in times.items()}
        row["way"] = spread(way)
        row["chosen to crc32"] = min(times[CHOSEN]) / min(times[BASE])
        row["chosen to way"] = min(times[CHOSEN]) / min(way)
        found[name] = row
        print(f"{name}: way {1e6 * min(way):.0f} us of CPU at each end")
        for n, t in times.items():
            print(f"  {n:14} {1e6 * min(t):8.1f} us  {100 * min(t) / min(way):5.1f} % of the way")
    print(write("checksum_cost", {"cpu_seconds": found}, asked.out))


if __name__ == "__main__":
    main()
