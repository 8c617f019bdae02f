"""Tell a damaged file from an error of the disk or the network, as pyarrow reports them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lit_llm.core.errors import UserError
from lit_llm.ingest.optional_package import need


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turn an error of pyarrow into a sentence about the file ``name``.

    Raises:
        UserError: The file is damaged, or pyarrow is too old for it.
    """
    pyarrow = need("pyarrow", extra="data", what="Parquet and Arrow")
    try:
        yield
    except pyarrow.ArrowNotImplementedError as error:
        raise UserError(
            f"{name} has a feature that pyarrow {pyarrow.__version__} does not read: pip install --upgrade pyarrow, "
            "or write the file again."
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of the name of a column
        if isinstance(error, OSError) and error.errno is not None:  # the operating system's own
            raise
        raise UserError(f"{name} is truncated or damaged: copy or download it again.") from error
