"""Errors of the library reach another process as they are."""

import importlib
import pickle
import pkgutil

import dino_vit

ARGUMENTS = {
    "ConfigError": (["optim.lr=0 is wrong", "there is no setting x"],),
    "NoImages": ("photos", ["a.txt", "b.txt"], ["c.tar"]),
    "UnreadableImage": ("a.jpg", "the file is empty"),
}


def error_classes():
    for module in pkgutil.walk_packages(dino_vit.__path__, "dino_vit."):
        if module.name != "dino_vit.__main__":
            for value in vars(importlib.import_module(module.name)).values():
                is_error = isinstance(value, type) and issubclass(value, Exception)
                if is_error and value.__module__ == module.name:
                    yield value


def test_errors_survive_pickling():
    kinds = list(error_classes())
    assert len(kinds) > 10
    for kind in kinds:
        error = kind(*ARGUMENTS.get(kind.__name__, ("what went wrong",)))
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind
        assert (str(copy), vars(copy)) == (str(error), vars(error))
        assert getattr(copy, "exit_code", None) == getattr(error, "exit_code", None)
