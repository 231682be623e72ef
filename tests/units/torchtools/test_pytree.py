"""Tensors inside whatever a model takes and returns: all of them found, the structure kept, the original untouched."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors


class Pair(NamedTuple):
    left: Any
    right: Any


Renamed = namedtuple("Renamed", "class item", rename=True)  # fields that no class statement can have


@dataclass
class Plain:
    item: Any
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    item: Any
    more: Any = None


@dataclass(slots=True)
class Slots:
    item: Any
    more: Any = None


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    item: Any
    more: Any = None


class Bag:
    """A plain object."""

    def __init__(self, **items: Any) -> None:
        vars(self).update(items)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


LEAVES = st.integers(-3, 3).map(lambda n: torch.full((2,), n)) | st.floats(-2, 2, width=32).map(torch.tensor)
OTHERS = st.none() | st.integers() | st.text(max_size=3) | st.just(torch.float16) | st.just(torch.Size([2, 3]))
KEYS = st.text(alphabet="abc", min_size=1, max_size=2)


def wrapped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(0, 3), inner, max_size=2),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(UserDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: Bag(**items)),
        *(pairs.map(lambda p, kind=kind: kind(*p)) for kind in (Pair, Renamed, Plain, Frozen, Slots, FrozenSlots)),
    )


NESTS = st.recursive(LEAVES | OTHERS, wrapped, max_leaves=6)


def leaves(value: Any) -> Iterator[Tensor]:
    """The oracle: one line for each kind that this file makes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from leaves(getattr(value, f.name))
    elif isinstance(value, Bag):
        yield from leaves(vars(value))


def same(a: Any, b: Any) -> bool:
    """Equality of structures: the same types, and tensors that are equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (dict, UserDict)):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return same(vars(a), vars(b)) if isinstance(a, Bag) else bool(a == b)


def follow(value: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        if isinstance(value, (dict, UserDict)):
            value = next(item for key, item in value.items() if str(key) == part)
        elif isinstance(value, (list, tuple)) and part.isdigit():
            value = value[int(part)]
        else:
            value = getattr(value, part)
    return value


@given(NESTS)
def test_every_tensor_is_found_once_and_in_order(value: Any) -> None:
    assert [id(tensor) for _, tensor in tensors(value)] == [id(tensor) for tensor in leaves(value)]


@given(NESTS)
def test_a_path_leads_back_to_its_tensor(value: Any) -> None:
    for path, tensor in tensors(value):
        assert follow(value, path) is tensor


@given(NESTS)
def test_the_identity_map_equals(value: Any) -> None:
    assert same(map_tensors(lambda tensor: tensor, value), value)


@given(NESTS)
def test_every_tensor_is_mapped_and_the_original_is_untouched(value: Any) -> None:
    before, held = copy.deepcopy(value), [id(tensor) for tensor in leaves(value)]
    mapped = map_tensors(lambda tensor: tensor.double() + 1, value)
    assert same(value, before)
    assert [id(tensor) for tensor in leaves(value)] == held
    old, new = list(leaves(value)), list(leaves(mapped))
    assert len(old) == len(new)
    for a, b in zip(old, new, strict=True):
        assert b.dtype is torch.float64
        assert torch.equal(b, a.double() + 1)
    assert same(map_tensors(lambda tensor: torch.zeros(()), mapped), map_tensors(lambda tensor: torch.zeros(()), value))


@given(NESTS)
def test_maps_compose(value: Any) -> None:
    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    def less(tensor: Tensor) -> Tensor:
        return tensor - 1

    assert same(map_tensors(less, map_tensors(double, value)), map_tensors(lambda t: less(double(t)), value))


def test_the_comparison_of_this_file_tells_structures_apart() -> None:
    one = torch.ones(2)
    assert same([one], [one.clone()])
    for a, b in [([one], (one,)), ([one], [one * 2]), ([one], [one.double()]), (Plain(one), Frozen(one)), ({}, [])]:
        assert not same(a, b)


def test_paths_are_those_of_the_structure() -> None:
    t = torch.ones(1)
    assert [path for path, _ in tensors(t)] == [""]
    assert [path for path, _ in tensors({"hidden": [1, t], "pair": Pair(t, None), 0: {"boxes": t}})] == [
        "hidden.1",
        "pair.left",
        "0.boxes",
    ]


@pytest.mark.parametrize(
    "value", [None, 5, "text", torch.nn.Linear(1, 1), Plain, len, torch.float16, torch.device("cpu")]
)
def test_what_holds_no_data_is_left_alone(value: Any) -> None:
    assert list(tensors([value])) == []
    assert map_tensors(torch.zeros_like, [value])[0] is value


# Kinds that hide what they hold.


@dataclass
class Hidden:
    """A field that a property hides, and which raises, as some model outputs deprecate theirs."""

    item: Any
    more: Any = None


def raising(self: Any) -> Any:
    raise RuntimeError("this field was renamed")


def hidden(item: Any, more: Any = None) -> Hidden:
    made = Hidden(item, more)
    made.__class__ = type("HiddenByProperty", (Hidden,), {"item": property(raising)})
    return made


def test_a_field_hidden_by_a_property_is_found_and_mapped() -> None:
    t = torch.ones(1)
    value = hidden(t, more=[t])
    assert [path for path, _ in tensors(value)] == ["item", "more.0"]
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert vars(mapped)["item"] == 2
    assert mapped.more == [2]
    assert vars(value)["item"] is t
    assert type(mapped) is type(value)


class Base:
    """Not slotted: what derives from it has a `__dict__` beside its slots."""


@dataclass(slots=True)
class SlotsBesideDict(Base):
    item: Any


@dataclass(slots=True)
class HalfFilled:
    item: Any
    later: Any = field(init=False)


@dataclass(init=False)
class Unfilled:
    item: Any
    later: Any

    def __init__(self, item: Any) -> None:
        self.item = item


@pytest.mark.parametrize("kind", [SlotsBesideDict, HalfFilled, Unfilled])
def test_a_dataclass_gives_what_the_instance_holds(kind: Callable[[Any], Any]) -> None:
    value = kind(torch.ones(1))
    assert [path for path, _ in tensors(value)] == ["item"]
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is type(value)
    assert mapped.item == 2
    assert value.item == 1


def test_a_dictionary_keeps_its_factory() -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, defaultdict(list, a=torch.ones(1)))
    assert mapped["a"] == 2
    assert mapped["new"] == []


def test_results_of_torch_keep_their_type() -> None:
    best = torch.tensor([[1.0, 3.0]]).max(dim=1)
    assert len(list(tensors(best))) == 2
    mapped = map_tensors(lambda tensor: tensor + 1, best)
    assert type(mapped) is type(best)
    assert (mapped.values, mapped.indices) == (4, 2)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    twice = map_tensors(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, packed)
    assert type(twice) is type(packed)
    assert torch.equal(twice.data, packed.data * 2)
    assert torch.equal(twice.batch_sizes, packed.batch_sizes)


# What transformers gives.


def test_a_model_output_with_missing_fields() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(logits=torch.ones(2), hidden_states=(torch.ones(1), torch.ones(1)))
    assert [path for path, _ in tensors(value)] == ["logits", "hidden_states.0", "hidden_states.1"]
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is type(value)
    assert list(mapped) == list(value) == ["logits", "hidden_states"]
    assert mapped.loss is None
    assert torch.equal(mapped.logits, torch.full((2,), 2.0))
    assert mapped["logits"] is mapped.logits is mapped[0]
    assert torch.equal(value.logits, torch.ones(2))
    assert value["logits"] is value.logits
    assert all(float(t) == 1 for t in value.hidden_states)


def test_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.full((1, 1, 2, 4), layer + 1.0), torch.full((1, 1, 2, 4), layer + 10.0), layer)
    value = {"past_key_values": cache}
    assert sorted(float(tensor.max()) for _, tensor in tensors(value)) == [1, 2, 10, 11]
    mapped = map_tensors(lambda tensor: tensor * 2, value)["past_key_values"]
    assert type(mapped) is type(cache)
    assert mapped is not cache
    assert mapped.get_seq_length() == cache.get_seq_length() == 2
    assert sorted(float(tensor.max()) for _, tensor in tensors(mapped)) == [2, 4, 20, 22]
    mapped.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0)
    assert mapped.get_seq_length() == 3
    assert cache.get_seq_length() == 2
    assert sorted(float(tensor.max()) for _, tensor in tensors(value)) == [1, 2, 10, 11]


def test_a_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, dtype=torch.int64)})
    mapped = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(mapped) is type(batch)
    assert mapped["input_ids"].tolist() == [2, 2]
    assert batch["input_ids"].tolist() == [1, 1]


# Cycles.


def family(children: int) -> Bag:
    parent = Bag(item=torch.ones(1))
    parent.children = [Bag(item=torch.ones(1), parent=parent) for _ in range(children)]
    return parent


def itself() -> list[Any]:
    ring: list[Any] = [torch.ones(1)]
    ring.append(ring)
    return ring


@pytest.mark.parametrize("value", [itself(), {"again": itself()}, family(3)], ids=["list", "dict", "objects"])
def test_a_cycle_ends_and_its_tensors_are_found(value: Any) -> None:
    found = list(tensors(value))
    assert found
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert {float(tensor) for _, tensor in tensors(value)} == {1}
    path = found[0][0]
    assert float(dict(tensors(mapped))[path]) == 2


def test_a_tensor_in_a_cycle_is_found_once() -> None:
    assert len(list(tensors(family(3)))) == 4


def test_a_tensor_deep_inside_is_found() -> None:
    value: Any = torch.ones(1)
    for _ in range(9):
        value = [value]
    assert len(list(tensors(value))) == 1


class Labelled(list[Any]):
    """A list that is made otherwise than from its items, and holds more than them."""

    def __init__(self, label: str, *items: Any) -> None:
        super().__init__(items)
        self.label = label


@pytest.mark.parametrize("kind", [deque, type("Window", (deque,), {})])
def test_a_window_of_the_last_steps_stays_as_long_as_it_was(kind: type[deque[Any]]) -> None:
    window = kind([torch.ones(2), "a", torch.ones(2)], maxlen=3)
    twin = map_tensors(lambda t: t * 2, window)
    assert type(twin) is kind
    assert twin.maxlen == 3
    assert [torch.equal(t, torch.full((2,), 2.0)) for t in (twin[0], twin[2])] == [True, True]
    assert torch.equal(window[0], torch.ones(2))


def test_a_list_of_the_users_own_class_keeps_what_else_it_holds() -> None:
    twin = map_tensors(lambda t: t * 2, Labelled("x", torch.ones(2)))
    assert type(twin) is Labelled
    assert twin.label == "x"
    assert torch.equal(twin[0], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (lambda: torch.ones(2), True),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), True),
        (lambda: torch.ones(2).to_sparse(), False),
        (lambda: torch.ones(2, device="meta"), False),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), False),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_plain_tensor_has_values_that_ops_can_read(made: Callable[[], Tensor], plain: bool) -> None:
    assert is_plain(made()) is plain
