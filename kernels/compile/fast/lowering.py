"""Lowering of kernels to LLVM: fewer instructions than Numba writes, for the same machine code.

Kernels hand bundles of C-contiguous arrays from function to function. Numba passes seven words or
more for each array, packs them into structures when a function begins, keeps those in memory, and
takes them apart again for every subscript and every call: nine of ten instructions, which LLVM has
to read and remove. Here an array is passed as its data pointer and its shape, bundles stay in
pieces (`_Pieces`), and what is assigned once needs no memory.

Kernels raise nothing and own no memory: calls are not followed by a check, ends of lifetimes by
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

from llvmlite import ir as llvm
from numba.core import cgutils, datamodel, ir, lowering, typed_passes, types
from numba.core.analysis import compute_cfg_from_blocks, compute_use_defs
from numba.core.callconv import CPUCallConv, excinfo_ptr_t
from numba.core.compiler_machinery import register_pass
from numba.core.cpu import CPUContext
from numba.core.datamodel.models import ArrayModel
from numba.core.datamodel.packer import _flatten
from numba.core.errors import LoweringError
from numba.np import arrayobj
from numba.np.numpy_support import as_dtype


# --- how arrays are passed ------------------------------------------------------------------------
def _is_plain(fe_type: types.Type) -> bool:
    """Whether a type is that of an array which its data pointer and its shape describe."""
    return type(fe_type) is types.Array and fe_type.layout == "C" and fe_type.ndim > 0


class _PlainArrayModel(ArrayModel):
    """Arrays, of which the C-contiguous are passed as data pointer and shape."""

    def get_argument_type(self):
        if not _is_plain(self._fe_type):
            return super().get_argument_type()
        data, shape = self.get_type("data"), self.get_type("shape")
        sizes = [self._dmm[one].get_argument_type() for one in shape]
        return (self._dmm[data].get_argument_type(), *sizes)

    def as_argument(self, builder, value):
        if not _is_plain(self._fe_type):
            return super().as_argument(builder, value)
        shape = self.get_field_position("shape")
        sizes = [builder.extract_value(value, [shape, i]) for i in range(self._fe_type.ndim)]
        return (builder.extract_value(value, self.get_field_position("data")), *sizes)

    def from_argument(self, builder, value):
        if not _is_plain(self._fe_type):
            return super().from_argument(builder, value)
        data, *shape = value
        intp = shape[0].type
        step = llvm.Constant(intp, as_dtype(self._fe_type.dtype).itemsize)
        parts = {"itemsize": step, "data": data, "nitems": shape[0]}
        for size in shape[1:]:
            parts["nitems"] = builder.mul(parts["nitems"], size)
        strides = [step]
        for size in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        parts["shape"] = cgutils.pack_array(builder, shape, intp)
        parts["strides"] = cgutils.pack_array(builder, strides, intp)
        array = llvm.Constant(self.get_value_type(), None)
        for name, part in parts.items():
            array = builder.insert_value(array, part, self.get_field_position(name))
        return array


_models = datamodel.DataModelManager().chain(datamodel.default_manager)
_models.register(types.Array, _PlainArrayModel)


class _KernelCallConv(CPUCallConv):
    """Numba's calling convention between functions that raise nothing."""

    def return_user_exc(self, builder, exc, exc_args=None, loc=None, func_name=None):
        """Stop the process. Numba writes it for `range(a, b, 0)`; kernels step by constants."""
        trap = llvm.FunctionType(llvm.VoidType(), ())
        builder.call(builder.module.declare_intrinsic("llvm.trap", (), trap), ())
        builder.unreachable()


class _KernelContext(CPUContext):
    """The target of kernels."""

    @property
    def call_conv(self):
        return _KernelCallConv(self)

    def declare_function(self, module, fndesc):
        known = fndesc.mangled_name in _lowered
        if not known and any(isinstance(one, types.Buffer) for one in fndesc.argtypes):
            raise LoweringError(f"{fndesc.qualname} is no kernel and takes an array")
        return super().declare_function(module, fndesc)


_lowered: set[str] = set()
"""Names of functions that take arrays as kernels do."""

_internal: dict = {}
"""What Numba compiles besides, for kernels only."""


def kernel_context(context: CPUContext) -> CPUContext:
    """The target of one kernel, made of a copy of Numba's that nobody else uses."""
    context.__class__ = _KernelContext
    context.data_model_manager = _models
    context.cached_internal_func = _internal
    return context


# --- values in pieces -----------------------------------------------------------------------------
class _Pieces(NamedTuple):
    """A tuple or an array that was not put together.

    Attributes:
        type: what it is to Numba.
        tree: what is passed: of a tuple its members' trees, of a plain array its data pointer and
            shape, of a number itself.
    """

    type: types.Type
    tree: Any


def _once_assigned(blocks: dict[int, ir.Block]) -> set[str]:
    """Variables that are assigned in one place, which every use comes after."""
    uses = compute_use_defs(blocks)
    assigned = Counter(
        one.target.name for block in blocks.values() for one in block.find_insts(ir.Assign)
    )
    dominators = compute_cfg_from_blocks(blocks).dominators()
    used = defaultdict(set)
    for label, names in uses.usemap.items():
        for name in names:
            used[name].add(label)
    return {
        name
        for label, names in uses.defmap.items()
        for name in names
        if assigned[name] == 1
        and all(label < other and label in dominators[other] for other in used[name])
    }


class _KernelLower(lowering.Lower):
    """Lowers one kernel."""

    def _find_singly_assigned_variable(self):
        self._singly_assigned_vars = _once_assigned(self.blocks)
        self._blk_local_varmap = {}

    def lower_block(self, block):
        self.pre_block(block)
        try:
            for inst in block.body:
                self.loc = inst.loc
                self.lower_inst(inst)
        except Exception as error:
            raise LoweringError(f'lowering "{inst}": {error}', loc=self.loc) from error
        self.post_block(block)

    def setup_function(self, fndesc):
        _lowered.add(fndesc.mangled_name)
        super().setup_function(fndesc)

    def extract_function_arguments(self):
        argtypes = self.fndesc.argtypes
        packer = self.context.get_arg_packer(argtypes)
        trees = packer._unflattener.unflatten(self.call_conv.get_arguments(self.function))
        self.fnargs = [self._of_tree(*one) for one in zip(argtypes, trees, strict=True)]
        return self.fnargs

    def _of_tree(self, fe_type, tree):
        """What was passed: in pieces, unless it is a single value."""
        if isinstance(tree, llvm.Value):
            return self.context.data_model_manager[fe_type].from_argument(self.builder, tree)
        return _Pieces(fe_type, tree)

    # --- variables --------------------------------------------------------------------------------
    def _peek(self, name):
        """The value of a variable, in pieces if it is."""
        if name in self._blk_local_varmap:
            return self._blk_local_varmap[name]
        return super().loadvar(name)

    def _whole(self, value):
        """A value, put together here if it is in pieces."""
        if not isinstance(value, _Pieces):
            return value
        return self.context.data_model_manager[value.type].from_argument(self.builder, value.tree)

    def loadvar(self, name):
        return self._whole(self._peek(name))

    def storevar(self, value, name, argidx=None):
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
            return
        self._alloca_var(name, self.typeof(name))
        self.builder.store(self._whole(value), self.getvar(name))

    def delvar(self, name):
        """Nothing is owned, so nothing is to be released."""

    def _cast_peek(self, name, fe_type):
        value = self._peek(name)
        if isinstance(value, _Pieces):
            if value.type == fe_type:
                return value
            value = self._whole(value)
        return self.context.cast(self.builder, value, self.typeof(name), fe_type)

    # --- expressions ------------------------------------------------------------------------------
    def lower_assign(self, ty, inst):
        if isinstance(inst.value, ir.Var):
            return self._cast_peek(inst.value.name, ty)
        return super().lower_assign(ty, inst)

    def lower_expr(self, resty, expr):
        if expr.op == "getattr":
            value = self._peek(expr.value.name)
            if isinstance(value, _Pieces):
                if isinstance(value.type, types.BaseNamedTuple) and expr.attr in value.type.fields:
                    i = value.type.fields.index(expr.attr)
                    return self._of_tree(value.type.types[i], value.tree[i])
                if expr.attr == "shape" and _is_plain(value.type):
                    return _Pieces(resty, tuple(value.tree[1:]))
        elif expr.op == "build_tuple" and all(isinstance(one, types.Number) for one in resty):
            items = zip(expr.items, resty, strict=True)
            return _Pieces(resty, tuple(self._cast_peek(one.name, ty) for one, ty in items))
        return super().lower_expr(resty, expr)

    def _lower_call_normal(self, fnty, expr, signature):
        if isinstance(fnty, types.Dispatcher) and len(expr.args) == len(signature.args):
            return self._call_kernel(fnty.dispatcher.overloads[tuple(signature.args)], expr.args)
        if getattr(fnty, "typing_key", None) is len:
            value = self._peek(expr.args[0].name)
            if isinstance(value, _Pieces) and _is_plain(value.type):
                return value.tree[1]
        return super()._lower_call_normal(fnty, expr, signature)

    def _call_kernel(self, callee, arguments):
        """Call a compiled function."""
        fndesc = callee.fndesc
        self.context.add_linking_libs([callee.library])
        function = self.context.declare_function(self.module, fndesc)
        trees = []
        for fe_type, variable in zip(fndesc.argtypes, arguments, strict=True):
            value = self._cast_peek(variable.name, fe_type)
            if isinstance(value, _Pieces):
                trees.append(value.tree)
            else:
                model = self.context.data_model_manager[fe_type]
                trees.append(model.as_argument(self.builder, value))
        result = self.context.call_conv.get_return_type(fndesc.restype).pointee
        slot = cgutils.alloca_once(self.builder, result)
        no_error = llvm.Constant(llvm.PointerType(excinfo_ptr_t), None)
        self.builder.call(function, [slot, no_error, *_flatten(trees)])
        return self.context.get_returned_value(
            self.builder, fndesc.restype, self.builder.load(slot)
        )

    # --- subscripts -------------------------------------------------------------------------------
    def lower_getitem(self, resty, expr, value, index, signature):
        array = self._plain_array(value.name)
        indices = self._indices(index.name)
        if array is None or indices is None or len(indices) > array.type.ndim:
            return super().lower_getitem(resty, expr, value, index, signature)
        place = self._place(array, indices)
        rest = array.tree[1 + len(indices) :]
        if not rest:
            item = arrayobj.load_item(self.context, self.builder, array.type, place)
            return self.context.cast(self.builder, item, array.type.dtype, resty)
        return _Pieces(resty, (place, *rest))

    def lower_setitem(self, target_var, index_var, value_var, signature):
        array = self._plain_array(target_var.name)
        indices = self._indices(index_var.name)
        if array is None or indices is None or len(indices) != array.type.ndim:
            return super().lower_setitem(target_var, index_var, value_var, signature)
        value = self._cast_peek(value_var.name, signature.args[2])
        value = self.context.cast(self.builder, value, signature.args[2], array.type.dtype)
        place = self._place(array, indices)
        return arrayobj.store_item(self.context, self.builder, array.type, value, place)

    def _plain_array(self, name):
        """The pieces of a plain array, or None."""
        value, fe_type = self._peek(name), self.typeof(name)
        if not _is_plain(fe_type):
            return None
        if isinstance(value, _Pieces):
            return value
        tree = self.context.data_model_manager[fe_type].as_argument(self.builder, value)
        return _Pieces(fe_type, tree)

    def _indices(self, name):
        """Pairs of type and value of an index that is an integer or a tuple of such, or None."""
        value, fe_type = self._peek(name), self.typeof(name)
        if isinstance(fe_type, types.Integer):
            return [(fe_type, value)]
        if not isinstance(fe_type, types.BaseTuple):
            return None
        if not all(isinstance(one, types.Integer) for one in fe_type):
            return None
        if isinstance(value, _Pieces):
            values = value.tree
        else:
            values = cgutils.unpack_tuple(self.builder, value)
        return list(zip(fe_type, values, strict=True))

    def _place(self, array, indices):
        """Pointer to the item, or the first item of the row, at the indices."""
        builder = self.builder
        data, *shape = array.tree
        place = None
        for (fe_type, index), size in zip(indices, shape, strict=False):
            wide = types.intp if fe_type.signed else types.uintp
            index = self.context.cast(builder, index, fe_type, wide)
            known = isinstance(index, llvm.Constant) and index.constant >= 0
            if fe_type.signed and not known:
                index = arrayobj.slicing.fix_index(builder, index, size)
            place = index if place is None else builder.add(builder.mul(place, size), index)
        for size in shape[len(indices) :]:
            place = builder.mul(place, size)
        return builder.gep(data, [place])


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(typed_passes.NativeLowering):
    """The pass that lowers a kernel."""

    _name = "kernel_lowering"

    @property
    def lowering_class(self):
        return _KernelLower
