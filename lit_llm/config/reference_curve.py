"""Which curve `fit --check_against` names."""

from __future__ import annotations

from pathlib import Path

from lit_llm.config.recipe_files import SHIPPED
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import CONFIG, default_run_dir


def reference_curve(named: str, config_files: list[str]) -> Path:
    """The file with the curve. "auto" is the curve shipped for the first recipe.

    Raises:
        UserError: No curve is shipped for the recipe.
    """
    if named != "auto":
        return Path(named)
    first = Path(config_files[0]) if config_files else Path()
    # The config.yaml of a run folder: the run is named after its recipe.
    recipe = first.absolute().parent.name if first.name == CONFIG else default_run_dir(config_files).name
    path = SHIPPED / "evidence" / f"{recipe}.csv"
    if not path.is_file():
        available = ", ".join(sorted(each.stem for each in path.parent.glob("*.csv")))
        raise UserError(f"no curve is shipped for {recipe}, only for {available} (--check_against FILE)")
    return path
