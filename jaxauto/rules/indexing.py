"""gather and the scatters.

The notation of XLA: an index vector addresses a slice of the operand. Operand dimensions are *batching* (matched with index dimensions),
*collapsed* or *inserted* (one element, absent from the slice) or *window* dimensions (kept in the slice).
"""

from __future__ import annotations

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, array_bytes, build, elements, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of

# How the updates of sharded index batches combine; overwriting does not.
COMBINED = {"scatter-add": "sum", "scatter-mul": "prod", "scatter-min": "min", "scatter-max": "max"}


@builtin_rule("gather")
def gather(eqn: Eqn) -> OpRule:
    """Embedding lookup: ``v d, b t _ -> b t d``, v reduced (each device looks up the rows it has, zeros elsewhere, then a sum).

    Index batch dimensions pass. Operand dimensions that a slice takes whole pass; those of which it takes one element are reduced; those of
    which it takes more must be whole. Reads what it takes out, and the indices.
    """
    numbers = eqn.params["dimension_numbers"]
    operand_shape, index_shape, result_shape = (shape_of(v) for v in (*eqn.invars, *eqn.outvars))
    operand: list[Dim] = [None] * len(operand_shape)
    index: list[Dim] = [*names(len(index_shape) - 1), None]
    result: list[Dim] = [None] * len(result_shape)
    reduced = {}

    batch_positions = [i for i in range(len(result_shape)) if i not in numbers.offset_dims]
    for position, factor in zip(batch_positions, index, strict=False):
        result[position] = factor
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[i] = index[j]
    offsets = iter(numbers.offset_dims)
    for i, size in enumerate(operand_shape):
        if i in numbers.operand_batching_dims:
            continue
        position = None if i in numbers.collapsed_slice_dims else next(offsets)
        taken = eqn.params["slice_sizes"][i]
        if taken == size and position is not None:
            operand[i] = result[position] = f"w{i}"
        elif taken == 1 and i in numbers.start_index_map:
            operand[i] = f"v{i}"
            reduced[f"v{i}"] = "sum"
    bytes_ = 2 * array_bytes(eqn.outvars[0]) + array_bytes(eqn.invars[1])
    return build(eqn, [operand, index], [result], kind=Kind.GATHER, reduce=reduced, flops=0.0, bytes_=bytes_)


@builtin_rule(*COMBINED, "scatter", "scatter-sub")
def scatter(eqn: Eqn) -> OpRule:
    """The transpose of gather: ``v d, b t _, b t d -> v d``: index batches are reduced into the result, or whole when they overwrite.

    A scattered dimension v passes from operand to result: each device applies the updates that fall in its part. Reads the updates and the
    indices, reads and writes the elements they fall on.
    """
    numbers = eqn.params["dimension_numbers"]
    operand_shape, index_shape, update_shape = (shape_of(v) for v in eqn.invars)
    operand: list[Dim] = [None] * len(operand_shape)
    index: list[Dim] = [*names(len(index_shape) - 1), None]
    update: list[Dim] = [None] * len(update_shape)

    batch_positions = [i for i in range(len(update_shape)) if i not in numbers.update_window_dims]
    for position, factor in zip(batch_positions, index, strict=False):
        update[position] = factor
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        operand[i] = index[j]
    windows = iter(numbers.update_window_dims)
    for i, size in enumerate(operand_shape):
        if i in numbers.operand_batching_dims:
            continue
        position = None if i in numbers.inserted_window_dims else next(windows)
        if position is not None and update_shape[position] == size:
            operand[i] = update[position] = f"w{i}"
        elif i in numbers.scatter_dims_to_operand_dims and (position is None or update_shape[position] == 1):
            operand[i] = f"v{i}"
    passing = {index[j] for j in numbers.scatter_indices_batching_dims}
    batches = [f for f in index if isinstance(f, str) and f not in passing]
    how = COMBINED.get(eqn.primitive.name)
    return build(
        eqn,
        [operand, index, update],
        [operand],
        kind=Kind.SCATTER,
        reduce=dict.fromkeys(batches, how) if how else {},
        whole=() if how else batches,
        flops=float(elements(eqn.invars[2])) if how else 0.0,
        bytes_=3 * array_bytes(eqn.invars[2]) + array_bytes(eqn.invars[1]),
    )
