"""The recipes as modules: ``python -m trl_packing.recipes.sft_packed`` works from any folder.

In a checkout, the recipes are the files of the folder `recipes/`, to be read, run and copied. The
wheel carries the same files, with their data and YAML files, in this folder. `FOLDER` is the one
that is in use:

    python -c "import trl_packing.recipes as r; print(r.FOLDER)"

A recipe imports another one by its full name, ``from trl_packing.recipes.recipe_data import ...``.
This also works for ``python recipes/sft_packed.py`` and for a copy in another folder. These imports
come first in every recipe, because what is set here must be set before torch is loaded.
"""

import os
from pathlib import Path

# With 2 threads on 2 busy cores, threads that spin while they wait made the demo 8 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HERE = Path(__file__).resolve().parent

FOLDER = _HERE if (_HERE / "sft_packed.py").exists() else _HERE.parents[1] / "recipes"

__path__ = [str(FOLDER)]
