"""Calls that were checked and planned once, and run again on other arrays of the same form.

What the checks say of GPU arrays, what is planned for them and all parameters but addresses follow from shapes,
strides, dtypes, devices and the low bits of addresses, never from where else the arrays lie or what they hold. So a
call of a form that was met before needs new addresses in old parameters, and nothing more.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from . import _arrays, _jit, _tiled
from ._arrays import Array
from ._fp8 import Fp8Array
from ._quantize import Tbq4Array

# No check and no plan looks at more of an address than what it is modulo this.
_ALIGNMENT = 64
# A stand-in's address has its number above these bits; offsets inside of an array have the bits.
_OFFSET_BITS = 48
# Forms of calls that are kept, after which all are forgotten: a form is a few kilobytes.
_MAX_FORMS = 1024
# Of an array of a form, whose tensor maps are at hand.
_MAX_ADDRESSES = 64

T = TypeVar("T")
R = TypeVar("R")


def parts(x: Any) -> tuple[Any, Array | None, Array | None, Array | None]:  # noqa: ANN401  an array or a cache of codes
    """Return rows, norms, mean and scales of a cache; of other objects than caches of codes the object itself."""
    # Parts of these were checked when they were made.
    if type(x) is Tbq4Array:
        return x.codes, x.norms, None if x.mean is None else _arrays.contiguous(x.mean), None
    if type(x) is Fp8Array:
        return x.codes, None, None, None if isinstance(x.scale, float) else _arrays.contiguous(x.scale)
    return x, None, None, None


def scale_of(x: object) -> float | None:
    """Return the scale of a cache whose heads have the same, which is a parameter and no array."""
    return x.scale if type(x) is Fp8Array and isinstance(x.scale, float) else None


def counter(x: Any) -> Any:  # noqa: ANN401  an array or a Tbq4Array
    """Return what counts clamped norms of a cache, None unless `append` could count in it on a GPU."""
    clamped = getattr(x, "clamped", None)
    return None if isinstance(clamped, (int, np.integer, np.ndarray)) else clamped


def taken(names: Sequence[str], given: Sequence[Any]) -> list[Array | None] | None:
    """Take arrays of any library over, as the checks do.

    Parameters
    ----------
    names : sequence of str
    given : sequence
        Arguments, or `parts` in place of caches.

    Returns
    -------
    list of array or None, or None
        Lengths that are not on a GPU become None: they are checked at every call. None in all if an argument is no
        array, of which the checks say more, or has codes and is of no class of this package, which they take apart.
    """
    found: list[Array | None] = []
    try:
        for name, x in zip(names, given, strict=False):
            if hasattr(x, "codes"):
                return None
            if name == "kv_len":
                found.append(_lengths_on_gpu(x))
            else:
                found.append(None if x is None else _arrays.as_array(name, x))
    except TypeError:
        return None
    return found


def on_host(lengths: object) -> bool:
    """Whether lengths were given that lie on the host, or none of which the checks would take."""
    try:
        return lengths is not None and _lengths_on_gpu(lengths) is None
    except TypeError:
        return True


def _lengths_on_gpu(kv_len: object) -> Array | None:
    """Return lengths that lie on a GPU, None for others."""
    if isinstance(kv_len, (int, float, np.generic, np.ndarray, Sequence, type(None))):
        return None
    lengths = _arrays.as_array("kv_len", kv_len)
    return lengths if _arrays.is_gpu(lengths) else None


def form_of(arrays: Sequence[Any], options: tuple[object, ...]) -> Hashable:
    """Return what a call's checks, plans and parameters follow from; None for one that is not to be looked up.

    Parameters
    ----------
    arrays : sequence of cupy.ndarray or None
        With any other object among them there is no form.
    options : tuple
        Numbers that are equal but of other types are other options: 1 is no flag.

    Returns
    -------
    Hashable
    """
    found: list[object] = []
    try:
        for x in arrays:
            if x is None:
                found.append(None)
            else:
                data = x.data
                found.append((x.shape, x.strides, x.dtype, data.device_id, data.ptr % _ALIGNMENT))
        inner = (tuple(map(type, x)) for x in options if type(x) is tuple)
        form = (*found, *options, *map(type, options), *inner)
        hash(form)
    # Only CuPy's arrays have such data: NumPy's is a buffer, which not every dtype has. And a list has no hash.
    except (AttributeError, TypeError, ValueError):
        return None
    return form


def on_own_device(run: Callable[..., R]) -> Callable[..., R]:
    """Make `run`, a method of an object with an `ordinal`, run with that device as the current one."""

    @wraps(run)
    def wrapper(self: Any, *args: Any) -> R:  # noqa: ANN401  those of `run`
        cuda = _arrays.import_cupy().cuda
        if cuda.runtime.getDevice() == self.ordinal:
            return run(self, *args)
        with cuda.Device(self.ordinal):
            return run(self, *args)

    return wrapper


def addresses(arrays: Iterable[Array | None]) -> list[int]:
    """Return where arrays begin, 0 for None."""
    return [0 if x is None else x.data.ptr for x in arrays]


class Forms(Generic[T]):
    """What was made for each form of a call, up to a number of forms."""

    def __init__(self) -> None:
        self._made: dict[Hashable, T] = {}

    def look_up(
        self, names: Sequence[str], given: list[Any], options: tuple[object, ...] = ()
    ) -> tuple[list[Any], Hashable, T | None]:
        """Return arrays, their form, and what was made for it.

        Parameters
        ----------
        names : sequence of str
        given : list
            Arguments that are arrays, `parts` in place of caches.
        options : tuple, optional

        Returns
        -------
        arrays : list of array or None
            Those given, taken over from other libraries.
        form : Hashable
            None for one that is not to be looked up.
        made : object or None
            None if nothing was made for the form.
        """
        form = form_of(given, options)
        if form is None and (arrays := taken(names, given)):
            given, form = arrays, form_of(arrays, options)
        return given, form, self._made.get(form)

    def put(self, form: Hashable, made: T) -> T:
        """Keep what was made for a form, unless the form is None, and return it."""
        if form is not None:
            if len(self._made) >= _MAX_FORMS:
                self._made.clear()
            self._made[form] = made
        return made

    def clear(self) -> None:
        """Forget everything: what would be made now is another thing."""
        self._made.clear()


class _Place(NamedTuple):
    """What CuPy calls the data of an array."""

    ptr: int


class _DeviceId(NamedTuple):
    id: int


class StandIn:
    """GPU array whose place in memory a launch learns when it runs; made by `StandIns`.

    Attributes
    ----------
    shape, strides, dtype : as those of an array
    data.ptr : int
        Number of the stand-in, above the low bits of the address of an array that it stands for.
    device.id : int
    """

    __slots__ = ("data", "device", "dtype", "itemsize", "ndim", "shape", "size", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], ptr: int, ordinal: int
    ) -> None:
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.ndim, self.size, self.itemsize = len(shape), math.prod(shape), dtype.itemsize
        self.data, self.device = _Place(ptr), _DeviceId(ordinal)

    def __getitem__(self, part: slice) -> StandIn:
        """Part of the first axis."""
        begin, end, _ = part.indices(self.shape[0])
        shape, ptr = (end - begin, *self.shape[1:]), self.data.ptr + begin * self.strides[0]
        return StandIn(shape, self.strides, self.dtype, ptr, self.device.id)


class StandIns:
    """Stand-ins for the arrays of a call on one device.

    Parameters
    ----------
    names : tuple of str
        Of all arrays; the number of a stand-in is the place of its name, from 1 on.
    ordinal : int
        Of the device.
    """

    def __init__(self, names: tuple[str, ...], ordinal: int) -> None:
        self._names, self._ordinal = names, ordinal
        self._made: dict[int, StandIn] = {}

    def __len__(self) -> int:
        return len(self._names)

    def _add(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, low: int) -> StandIn:  # noqa: ANN401
        number = self._names.index(name) + 1
        made = StandIn(shape, strides, np.dtype(dtype), (number << _OFFSET_BITS) + low, self._ordinal)
        return self._made.setdefault(number, made)

    def of(self, name: str, x: Array | None) -> StandIn | None:
        """Stand in for an array; None stays."""
        return None if x is None else self._add(name, x.shape, x.strides, x.dtype, x.data.ptr % _ALIGNMENT)

    def contiguous(self, name: str, shape: tuple[int, ...], dtype: Any) -> StandIn:  # noqa: ANN401  a dtype of any kind
        """Stand in for an array in C order that does not exist yet, which CuPy aligns."""
        sizes = (*shape[1:], 1)
        strides = tuple(math.prod(sizes[i:]) * np.dtype(dtype).itemsize for i in range(len(shape)))
        return self._add(name, shape, strides, dtype, 0)

    def name_of(self, address: int) -> str:
        """Return the name of the array in which an address lies."""
        return self._names[self.source(address)[0] - 1]

    def source(self, address: int) -> tuple[int, int]:
        """Return the number of the stand-in in which an address lies, 0 for null, and how far behind its begin."""
        number = address >> _OFFSET_BITS
        return number, address - self._made[number].data.ptr if number else 0


class Launch(NamedTuple):
    """One launch, whose parameters have the addresses of stand-ins.

    `tensor_maps` are of arrays `x` whose maps are the parameters ``x_map``.
    """

    kernel: _jit.Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: np.ndarray[Any, Any]
    tensor_maps: tuple[_tiled.TensorTiles, ...] = ()


class _Patch(NamedTuple):
    """Addresses of `pick` go to `place` of the parameters."""

    pack: Callable[..., None]
    buffer: memoryview
    place: int
    pick: Callable[[list[int]], Sequence[int]]


def _pointer_runs(fields: np.dtype[Any], offset: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where successive pointers of a parameter struct begin, and how many they are."""
    places = sorted(_pointers(fields, offset))
    while places:
        count = 1
        while count < len(places) and places[count] == places[0] + 8 * count:
            count += 1
        yield places[0], count
        del places[:count]


def _pointers(fields: np.dtype[Any], offset: int) -> Iterator[int]:
    for dtype, place, *_ in (fields.fields or {}).values():
        if dtype.fields:
            yield from _pointers(dtype, offset + place)
        elif dtype == np.uint64:
            yield offset + place


def _writer_of(tiles: _tiled.TensorTiles) -> Callable[..., None]:
    """Return what writes the tensor map of such tiles of an array at another address."""

    @lru_cache(_MAX_ADDRESSES)
    def map_at(pointer: int) -> bytes:
        return _tiled.tensor_map(replace(tiles, pointer=pointer)).tobytes()

    def write(buffer: memoryview, place: int, pointer: int) -> None:
        tensor_map = map_at(pointer)
        buffer[place : place + len(tensor_map)] = tensor_map

    return write


def _picker(indices: list[int]) -> Callable[[list[int]], Sequence[int]]:
    """Return what picks elements of a list, also a single one, as a sequence."""
    return itemgetter(*indices) if len(indices) > 1 else itemgetter(slice(indices[0], indices[0] + 1))


class Launches:
    """Launches in their order, for other arrays each time.

    Parameters
    ----------
    stand_ins : StandIns
        All that occur in the parameters.
    launches : iterable of Launch
    """

    def __init__(self, stand_ins: StandIns, launches: Iterable[Launch]) -> None:
        # Parts of arrays: number of the array and offset in it. Their addresses follow those of the arrays.
        self._parts: list[tuple[int, int]] = []
        self._bound: list[tuple[threading.Lock, list[_Patch], Callable[[], None]]] = []
        for launch in launches:
            params = launch.params.copy()
            buffer = params.view(np.uint8).data
            patches = []
            for place, count in _pointer_runs(params.dtype):
                pointers = struct.Struct(f"{count}Q")
                indices = [self._index(stand_ins, address) for address in pointers.unpack_from(buffer, place)]
                patches.append(_Patch(pointers.pack_into, buffer, place, _picker(indices)))
            for tiles in launch.tensor_maps:
                place = (params.dtype.fields or {})[f"{stand_ins.name_of(tiles.pointer)}_map"][1]
                index = self._index(stand_ins, tiles.pointer)
                patches.append(_Patch(_writer_of(tiles), buffer, place, _picker([index])))
            self._bound.append((threading.Lock(), patches, launch.kernel.bind(launch.grid, launch.block, params)))

    def _index(self, stand_ins: StandIns, address: int) -> int:
        """Where `run` has the address for one of the parameters'."""
        number, offset = stand_ins.source(address)
        if offset == 0:
            return number
        if (number, offset) not in self._parts:
            self._parts.append((number, offset))
        return len(stand_ins) + 1 + self._parts.index((number, offset))

    def run(self, pointers: list[int]) -> None:
        """Launch on the current stream of the current device.

        Parameters
        ----------
        pointers : list of int
            Addresses of the arrays in the order of their stand-ins' names, behind a 0; 0 also for None. Is changed.
        """
        pointers += [pointers[number] + offset for number, offset in self._parts]
        for lock, patches, start in self._bound:
            with lock:  # threads share the parameters of a form
                for pack, buffer, place, pick in patches:
                    pack(buffer, place, *pick(pointers))
                start()
