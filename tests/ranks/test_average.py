"""The mean over replicas against a plain loop, on real processes and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet.ranks import average
from hdet.ranks.average import average_
from hdet.ranks.group import Solo, connect
from hdet.ranks.weights import fingerprint, fingerprint_of_words
from tests.processes import run_ranks


def odd_tensors(rank: int) -> list[torch.Tensor]:
    """Every shape and type that has been trouble: strided, empty, zero-dim, half, complex, larger than a bucket."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        draw(5, 7),
        draw(),
        draw(0, 3),
        draw(6, 4).t(),
        draw(40, 30).t()[::2],
        draw(1000).float(),
        draw(3, 300).float().t(),
        draw(64).bfloat16(),
        draw(33, 2).half(),
        torch.complex(draw(8, 3), draw(8, 3)),
        draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]


def mean_of(rows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    wide = [[t.to(torch.complex128 if t.is_complex() else torch.float64) for t in row] for row in rows]
    return [sum(column) / len(rows) for column in zip(*wide, strict=True)]  # type: ignore[misc]


def average_on(rank: int, live: list[bool], extra_bytes: int) -> dict[str, Any]:
    tensors = odd_tensors(rank)
    if not live[rank]:
        tensors[0].fill_(float("nan"))
    before = [t.clone() for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    far, norm = average_(tensors, connect(None), live, extra_bytes=extra_bytes, measure=True)
    assert [t.data_ptr() for t in tensors] == addresses
    assert [t.stride() for t in tensors] == [t.stride() for t in odd_tensors(rank)]
    plain = [t.clone() for t in before]
    assert average_(plain, connect(None), live, extra_bytes=extra_bytes) == (0.0, 0.0)
    for a, b in zip(plain, tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return {"tensors": tensors, "far": far, "norm": norm}


@pytest.mark.parametrize("extra_bytes", [average.EXTRA_BYTES, 4 * 8 * 64], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("live", [[True] * 3, [True, False, True]], ids=["all", "one left out"])
def test_mean_over_three_processes(live: list[bool], extra_bytes: int) -> None:
    answers = run_ranks(average_on, 3, live, extra_bytes)
    rows = [odd_tensors(rank) for rank in range(3) if live[rank]]
    expected = mean_of(rows)
    for rank, answer in enumerate(answers):
        for ours, mean in zip(answer["tensors"], expected, strict=True):
            torch.testing.assert_close(ours, mean.to(ours.dtype))
        if live[rank]:
            squares = [(t - m).abs().square().sum() for t, m in zip(odd_tensors(rank), expected, strict=True)]
            assert answer["far"] == pytest.approx(sum(squares).sqrt().item(), rel=1e-2)  # type: ignore[union-attr]
            total = sum(m.abs().square().sum() for m in expected)
            assert answer["norm"] == pytest.approx(total.sqrt().item(), rel=1e-2)  # type: ignore[union-attr]


def test_half_precision_is_summed_in_fp32() -> None:
    answers = run_ranks(_average_half, 3)
    assert answers == [[1.0, 30000.0]] * 3


def _average_half(rank: int) -> list[float]:
    # in bf16, 1 + 2**-8 is 1; in fp16, 3 * 30000 overflows
    small = torch.tensor([1.0]).bfloat16()
    large = torch.tensor([30000.0]).half()
    average_([small, large], connect(None), [True] * 3)
    return [small.item(), large.item()]


def test_extra_memory_is_bounded() -> None:
    peaks = run_ranks(_largest_flat, 2)
    for flat_bytes, under_way in peaks:
        assert flat_bytes <= 2**20 // 4
        assert under_way <= 4


def _largest_flat(rank: int) -> tuple[int, int]:
    group = connect(None)
    sizes, open_now, most = [], 0, 0

    class Watched:
        replica_index, members = group.replica_index, group.members

        def start_sum(self, flat: torch.Tensor) -> Any:
            nonlocal open_now, most
            sizes.append(flat.numel() * flat.element_size())
            open_now += 1
            most = max(most, open_now)
            wait = group.start_sum(flat)

            def done() -> None:
                nonlocal open_now
                wait()
                open_now -= 1

            return done

    tensors = [torch.full((300_000,), float(rank)), torch.full((1000, 100), float(rank)).t()]
    average_(tensors, Watched(), [True, True], extra_bytes=2**20)  # type: ignore[arg-type]
    assert all(bool((t == 0.5).all()) for t in tensors)
    return max(sizes), most


def test_alone_the_mean_is_the_tensor() -> None:
    tensors = odd_tensors(1)
    average_(tensors, Solo(), [True])
    for ours, same in zip(tensors, odd_tensors(1), strict=True):
        torch.testing.assert_close(ours, same, rtol=0, atol=0)


def test_fingerprint_sees_every_bit_and_its_place() -> None:
    cpu = torch.device("cpu")

    def print_of(*tensors: torch.Tensor) -> float:
        bits = int(fingerprint(tensors, cpu))
        assert int(float(bits)) == bits
        return float(bits)

    x = torch.arange(100.0)
    assert print_of(x) == print_of(x.clone())
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    nudged = x.clone()
    nudged[50] = torch.nextafter(x[50], torch.tensor(1e9))
    minus_zero = x.clone()
    minus_zero[0] = -0.0
    prints = [print_of(v) for v in (x, swapped, nudged, minus_zero, x[:50], x.double())] + [print_of(x[:50], x[50:])]
    assert len(set(prints)) == len(prints)


def test_fingerprint_of_words() -> None:
    values = {
        fingerprint_of_words(["a"]),
        fingerprint_of_words(["b"]),
        fingerprint_of_words(["a", "b"]),
        fingerprint_of_words(["b", "a"]),
        fingerprint_of_words([]),
    }
    assert len(values) == 5
    assert all(v == int(v) for v in values)


def test_our_group_is_our_own_and_made_once() -> None:
    assert run_ranks(_own_group, 2) == [True, True]


def _own_group(rank: int) -> bool:
    first, second = connect(None), connect(None)
    return first._group is second._group is not dist.group.WORLD  # type: ignore[attr-defined]
