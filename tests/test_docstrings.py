# SPDX-License-Identifier: Apache-2.0
"""Public names explain themselves: what they are, their parameters, and whether all ranks must call them."""

import inspect
import re

import pytest

import cudecomp
from cudecomp import testing

# Objects that live on every rank of a communicator: each of their methods says who has to call it.
SHARED = [name for name in ("Plan", "TransposePlan", "HaloPlan", "Call", "Workspace") if hasattr(cudecomp, name)]


def public_objects():
    """The functions and classes that `import cudecomp` and `cudecomp.testing` offer, by name."""
    objects = {name: getattr(cudecomp, name) for name in cudecomp.__all__}
    objects |= {f"testing.{name}": getattr(testing, name) for name in testing.__all__}
    return {name: value for name, value in objects.items() if callable(value)}


def members(cls):
    """The public methods and properties that a class itself defines, by name."""
    kinds = (property, classmethod, staticmethod)
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, kinds) or inspect.isdatadescriptor(value))
    }


def documented():
    """Yield (qualified name, object) of everything that needs a docstring."""
    for name, value in public_objects().items():
        yield name, value
        if inspect.isclass(value):
            for member in members(value):
                yield f"{name}.{member}", getattr(value, member)


def parameters(value):
    """The names of the parameters, () where the object has no signature of its own."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ()
    try:
        names = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in names if name not in {"self", "cls", "args", "kwargs"})


def prose(value):
    return inspect.getdoc(value) or ""


def shared_methods():
    for name in SHARED:
        cls = getattr(cudecomp, name)
        for member, value in members(cls).items():
            if callable(value) or isinstance(value, classmethod | staticmethod):
                yield f"{name}.{member}", getattr(cls, member)


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in documented()])
def test_docstring(name, value):
    """Each parameter is named, or the docstring says where: "as for `run`"."""
    text = prose(value)
    assert text.strip(), f"{name} has no docstring"
    missing = [word for word in parameters(value) if not re.search(rf"\b{word}\b", text)]
    assert not missing or "as for `" in text, f"{name} says nothing of {missing}"


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in shared_methods()])
def test_collective_or_local(name, value):
    assert re.search(r"\b(collective|local)\b", prose(value), re.IGNORECASE), f"{name}: collective or local?"


@pytest.mark.parametrize("name", SHARED)
def test_constructor_is_collective_or_local(name):
    assert re.search(r"\b(collective|local)\b", prose(getattr(cudecomp, name)), re.IGNORECASE)


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in documented()])
def test_numpydoc_sections(name, value):
    """Section titles are those of numpydoc, underlined to their length."""
    sections = {
        "Parameters",
        "Returns",
        "Yields",
        "Raises",
        "Notes",
        "Examples",
        "Attributes",
        "See Also",
        "References",
    }
    for title, line in re.findall(r"^([A-Z][A-Za-z ]+)\n(-{3,})$", prose(value), re.MULTILINE):
        assert title in sections, f"{name}: section {title!r}"
        assert len(title) == len(line), f"{name}: the line under {title}"
