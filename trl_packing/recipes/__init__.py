"""The recipes, as ``python -m trl_packing.recipes.sft_packed``, from any folder.

In the repository they lie in `recipes/`, readable files to run or to copy; a wheel carries them in
this folder, their data and YAML files too. `FOLDER` says where they are:

    python -c "import trl_packing.recipes as r; print(r.FOLDER)"
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[1] / "recipes"

FOLDER = _HERE if (_HERE / "sft_packed.py").exists() else _CHECKOUT

if FOLDER != _HERE:
    __path__.append(str(FOLDER))
# Run as a file, a recipe finds its neighbors (`from recipe_data import ...`) beside itself; run as
# a module it would not.
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
