"""Build hook: the wheel carries `recipes/` as `trl_packing/recipes/`.

An editable install uses `recipes/` in place (`trl_packing/recipes/__init__.py`).
"""

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
