"""Matrices are views of their parameters, and mean the same whatever the strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dmuon.policy import Matrix, MatrixPolicy, Slot

KINDS = {
    "linear": Slot("w", (6, 4), "linear"),
    "linear_transposed": Slot("w", (4, 6), "linear_transposed"),
    "stack": Slot("w", (3, 6, 4)),
    "stack_transposed": Slot("w", (3, 4, 6), "linear_transposed"),
    "conv": Slot("w", (6, 4, 3, 2), "conv"),
    "conv_groups": Slot("w", (6, 4, 3, 2), "conv", groups=2),
    "conv_transposed": Slot("w", (4, 6, 3, 2), "conv_transposed"),
    "conv_transposed_groups": Slot("w", (4, 6, 3, 2), "conv_transposed", groups=2),
}


def only_matrix(slot: Slot) -> Matrix:
    [matrix] = MatrixPolicy().route(slot).matrices
    return matrix


def polar(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def by_hand(kind: str, gradient: Tensor) -> Tensor:
    """The orthogonalised gradient, in its own shape, by reshaping a contiguous copy."""
    gradient = gradient.contiguous()
    shape = gradient.shape
    if kind == "linear_transposed":
        return polar(gradient.T).T
    if kind == "stack_transposed":
        return torch.stack([polar(expert.T).T for expert in gradient])
    if kind == "stack":
        return torch.stack([polar(expert) for expert in gradient])
    if kind.endswith("groups"):
        return torch.cat([polar(part.reshape(len(part), -1)).view_as(part) for part in gradient.chunk(2)])
    return polar(gradient.reshape(shape[0], -1)).view(shape)


@pytest.mark.parametrize(
    ("kind", "parameter_last", "gradient_last"),
    [(kind, False, False) for kind in KINDS]
    + [
        (kind, *last)
        for kind in KINDS
        if "conv" in kind
        for last in ((False, True), (True, False), (True, True))
    ],
)
def test_update_through_views_equals_the_one_by_hand(
    kind: str, parameter_last: bool, gradient_last: bool
) -> None:
    slot = KINDS[kind]
    torch.manual_seed(0)
    formats = {False: torch.contiguous_format, True: torch.channels_last}
    parameter = torch.randn(slot.shape, dtype=torch.float64).to(memory_format=formats[parameter_last])
    gradient = torch.randn(slot.shape, dtype=torch.float64).to(memory_format=formats[gradient_last])
    expected = parameter - by_hand(kind, gradient)

    matrix = only_matrix(slot)
    view = matrix.view(parameter)
    assert view.shape == (matrix.batch, matrix.rows, matrix.cols)
    assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    view -= polar(matrix.read(gradient, parameter))
    torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)


def test_reading_a_gradient_with_its_parameters_strides_copies_nothing() -> None:
    parameter = torch.randn(6, 4, 3, 2).to(memory_format=torch.channels_last)
    gradient = torch.randn_like(parameter)
    read = only_matrix(KINDS["conv"]).read(gradient, parameter)
    assert read.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize(
    ("slot", "sizes"),
    [
        (Slot("w", (128, 8), "linear"), (96, 16, 16)),
        (Slot("w", (8, 128), "linear_transposed"), (96, 16, 16)),
        (Slot("w", (3, 12, 4)), (6, 6)),
        (Slot("w", (3, 4, 12), "linear_transposed"), (6, 6)),
    ],
)
def test_split_views_tile_the_parameter(slot: Slot, sizes: tuple[int, ...]) -> None:
    parameter = torch.zeros(slot.shape)
    matrices = MatrixPolicy(splits={"w": sizes}).route(slot).matrices
    for number, matrix in enumerate(matrices, start=1):
        matrix.view(parameter).add_(number)
    columns = slot.kind == "linear_transposed"
    expected = torch.repeat_interleave(torch.arange(1.0, len(sizes) + 1), torch.tensor(sizes))
    assert torch.equal(parameter, (expected if columns else expected[:, None]).expand(slot.shape))


def test_conv1d_and_conv3d_views() -> None:
    for parameter in (
        torch.randn(4, 3, 5),
        torch.randn(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    ):
        view = only_matrix(Slot("w", tuple(parameter.shape), "conv")).view(parameter)
        assert view.data_ptr() == parameter.data_ptr()
        assert view.shape == (1, 4, parameter.numel() // 4)


def test_pointwise_and_single_channel_kernels_in_channels_last() -> None:
    for shape in ((6, 4, 1, 1), (6, 1, 3, 3)):
        parameter = torch.randn(shape).to(memory_format=torch.channels_last)
        assert only_matrix(Slot("w", shape, "conv")).view(parameter).data_ptr() == parameter.data_ptr()


def test_a_non_contiguous_linear_weight_needs_no_copy() -> None:
    parameter = torch.zeros(12, 8)[::2, ::2]
    only_matrix(Slot("w", (6, 4), "linear")).view(parameter).fill_(1)
    assert torch.equal(parameter, torch.ones(6, 4))


def test_a_parameter_that_no_view_can_follow_is_refused() -> None:
    sliced = torch.zeros(6, 4, 3, 4)[..., :2]
    with pytest.raises(ValueError, match="make it contiguous"):
        only_matrix(KINDS["conv"]).view(sliced)


def test_another_shape_is_refused() -> None:
    matrix = only_matrix(KINDS["linear"])
    with pytest.raises(ValueError, match=r"\(6, 4\).*\(4, 6\)"):
        matrix.view(torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"\(6, 4\).*\(6, 5\)"):
        matrix.read(torch.zeros(6, 5), torch.zeros(6, 4))


def test_rows_are_outputs_and_columns_inputs() -> None:
    """The transposed convolution's matrix maps one input position to the outputs that it reaches."""
    layer = nn.ConvTranspose1d(3, 5, kernel_size=2, stride=2, bias=False)
    matrix = only_matrix(Slot("w", (3, 5, 2), "conv_transposed"))
    pixel = torch.randn(3)
    reached = layer(pixel[None, :, None]).detach()[0]
    assert torch.allclose(matrix.view(layer.weight.detach())[0] @ pixel, reached.flatten())
