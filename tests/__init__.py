"""Check types and shapes of arguments while tests run. An int may stand for a float, as mypy has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
