"""Encodings against slow references: fp8 to the nearest value, the others and the compression exactly."""

import math
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.shards.encoding import STORED_DTYPE, compress, decode, decompress, encode
from eagle3.shards.hidden_states import hidden_state_bytes

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# All non-negative e4m3 values by code: four exponent bits (bias 7), three mantissa bits; code 127 is not a
# number.
E4M3 = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** max(e - 7, -6) for e in range(16) for m in range(8)][:-1]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_frame(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def nearest_e4m3(value: float) -> float:
    """To the nearest code, of two to the even one."""
    code = min(range(len(E4M3)), key=lambda c: (abs(E4M3[c] - abs(value)), c % 2))
    return math.copysign(E4M3[code], value)


def slow_fp8(state: list[float]) -> tuple[list[float], float]:
    """Stored values and scale of one state."""
    scale = 2.0**-200
    while max(map(abs, state)) / scale > 448:
        scale *= 2
    return [nearest_e4m3(value / scale) for value in state], scale


def byte_shuffle(data: bytes, width: int) -> bytes:
    return b"".join(data[byte::width] for byte in range(width))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp32"])
def test_plain_encodings_only_round_to_their_dtype(encoding: str, dtype: torch.dtype) -> None:
    states = randn(7, 3, 5).to(dtype)
    stored, scales = encode(states, encoding)
    assert scales is None
    assert stored.dtype == STORED_DTYPE[encoding]
    assert torch.equal(decode(stored, scales), states.to(STORED_DTYPE[encoding]))


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_states_of_the_same_dtype_are_exact(encoding: str, dtype: torch.dtype) -> None:
    states = randn(7, 3, 5).to(dtype)
    states[0, 0, :2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal]).to(dtype)
    assert torch.equal(decode(*encode(states, encoding)), states)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_stores_the_nearest_values_under_the_smallest_scale(dtype: torch.dtype) -> None:
    states = (randn(6, 3, 33) * torch.logspace(-4, 3, 18).reshape(6, 3, 1)).to(dtype)
    # Largest values next to and at 448 × 2^k, where the scale changes; ties of two codes (17 of 16 and 18).
    states[0, 0, 0], states[0, 1, 0], states[0, 2, :2] = 448, 3.5, torch.tensor([448, 17])
    states[1, 0, 0], states[1, 1, 0], states[1, 2, :2] = 449, 447, torch.tensor([448, 19])
    stored, scales = encode(states, "fp8")
    assert scales is not None
    assert (stored.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (6, 3))
    back = decode(stored, scales)
    assert back.dtype == torch.bfloat16
    for row in range(6):
        for layer in range(3):
            expected, scale = slow_fp8(states[row, layer].float().tolist())
            assert scales[row, layer].item() == scale
            assert stored[row, layer].float().tolist() == expected
            assert back[row, layer].tolist() == [value * scale for value in expected]


def test_fp8_keeps_small_values_next_to_an_outlier() -> None:
    state = torch.cat([torch.tensor([2.5e4]), 2 * randn(99) + 3, torch.tensor([1e-3, 0.0])])
    back = decode(*encode(state[None], "fp8"))[0].float()
    ordinary = state.abs() > 2.5e4 * 2**-13
    assert ordinary.sum() > 40
    assert ((back - state).abs() <= 2**-4 * state.abs())[ordinary].all()
    assert ((back - state).abs() <= 2.0**-10 * 128)[
        ~ordinary
    ].all()  # half of e4m3's smallest step, times the scale
    assert back[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("largest", [224.5, 300.0, 448.0])
def test_fp8_keeps_small_values_down_to_its_documented_limit(largest: float) -> None:
    kept, gone = 1.25 * largest * 2**-13, 0.99 * largest * 2**-19
    back = decode(*encode(torch.tensor([[largest, kept, gone]]), "fp8"))[0].float()
    assert abs(back[1].item() - kept) <= 2**-4 * kept
    assert back[2] == 0


@pytest.mark.parametrize("factor", [1e-30, 1e-10, 1e10, 1e30])
def test_fp8_does_not_depend_on_magnitude(factor: float) -> None:
    power = 2.0 ** round(math.log2(factor))
    states = randn(5, 3, 16)
    (stored, scales), (scaled, other) = encode(states, "fp8"), encode(states * power, "fp8")
    assert torch.equal(stored.float(), scaled.float())
    assert scales is not None
    assert other is not None
    assert torch.equal(other, scales * power)


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp32", "fp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_state_that_is_not_finite_is_refused(encoding: str, value: float) -> None:
    states = randn(4, 3, 5)
    states[2, 1, 3] = value
    with pytest.raises(ValueError, match="a zero or non-finite hidden state"):
        encode(states, encoding)


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp32", "fp8"])
def test_an_all_zero_state_is_refused(encoding: str) -> None:
    states = randn(4, 3, 5)
    states[2, 1] = 0
    with pytest.raises(ValueError, match="a zero or non-finite hidden state"):
        encode(states, encoding)
    states[2, 1, 4] = 1
    encode(states, encoding)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("fp16", 1e5),
        ("fp16", 1e-9),
        ("bf16", 1e-42),
        ("bf16", 3.4e38),
        ("fp8", 1e-38),
        ("fp8", 3e-44),
        ("bf16", 1e300),
    ],
)
def test_a_state_that_its_encoding_cannot_hold_is_refused(encoding: str, value: float) -> None:
    with pytest.raises(ValueError, match="a zero or non-finite hidden state"):
        encode(torch.tensor([[value, 0.0]], dtype=torch.float64), encoding)


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp32", "fp8"])
def test_size_counts_values_and_scale(encoding: str) -> None:
    stored, scales = encode(randn(1, 48), encoding)
    expected = len(raw_bytes(stored)) + (0 if scales is None else len(raw_bytes(scales)))
    assert hidden_state_bytes(1, 0, 1, 48, encoding) - 5 == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_frames_of_any_shape_are_decompressed_bit_for_bit(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    encoding = data.draw(st.sampled_from(sorted(STORED_DTYPE)))
    bits = randn(math.prod(shape) * STORED_DTYPE[encoding].itemsize, seed=len(shape)).mul(50).to(torch.uint8)
    stored = bits.view(STORED_DTYPE[encoding]).reshape(shape)
    frame = compress(stored)
    back = decompress(as_frame(frame), shape, stored.dtype)
    assert (back.shape, back.dtype, raw_bytes(back)) == (stored.shape, stored.dtype, raw_bytes(stored))
    shuffled = pa.Codec("zstd").decompress(frame, decompressed_size=len(bits), asbytes=True)
    assert shuffled == byte_shuffle(raw_bytes(stored), stored.element_size())


def test_a_view_and_its_copy_compress_to_the_same_bytes() -> None:
    states = randn(6, 4, 5)
    assert compress(states[1:5, :-1].transpose(0, 1)) == compress(
        states[1:5, :-1].transpose(0, 1).contiguous()
    )


def test_a_frame_without_elements_is_valid() -> None:
    for encoding in STORED_DTYPE:
        stored, scales = encode(torch.empty(0, 5), encoding)
        back = decompress(as_frame(compress(stored)), (0, 5), stored.dtype)
        assert decode(back, scales).shape == (0, 5)


@pytest.mark.parametrize(
    "damage", [lambda f: f[:-1], lambda f: b"", lambda f: f + b"\0", lambda f: b"\0" * len(f)]
)
def test_a_damaged_frame_is_refused(damage: Any) -> None:
    with pytest.raises(ValueError, match="a frame must hold 80 bytes of zstd"):
        decompress(
            as_frame(damage(compress(randn(4, 5)))) if damage(b"x") else torch.empty(0, dtype=torch.uint8),
            (4, 5),
            torch.float32,
        )


@pytest.mark.parametrize("shape", [(4, 4), (4, 6)])
def test_a_frame_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"a frame must hold {4 * math.prod(shape)} bytes of zstd"):
        decompress(as_frame(compress(randn(4, 5))), shape, torch.float32)


def test_compression_makes_states_smaller() -> None:
    states = randn(512, 4, 64) * torch.logspace(-1, 1, 64)
    for encoding, share in (("bf16", 0.85), ("fp32", 0.95), ("fp8", 0.97)):
        stored, _ = encode(states, encoding)
        assert len(compress(stored)) < share * len(raw_bytes(stored))
