"""A wheel carries `recipes/` as `trl_packing/recipes/`; an editable install finds it in place."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecipesHook(BuildHookInterface):
    """Add every file of `recipes/` to the wheel, beside `trl_packing/recipes/__init__.py`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        recipes = Path(self.root) / "recipes"
        for file in sorted(recipes.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                inside = f"trl_packing/recipes/{file.relative_to(recipes).as_posix()}"
                build_data["force_include"][str(file)] = inside
