"""Small pictures of images, for pages: JPEG or PNG inside of the page, as `data:` URIs."""

import base64
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only runs with images need Pillow
    from PIL import Image as PillowImage

_LONGEST = 160  # pixels of a side; shown at half of it, so that it is sharp on any screen
_QUALITY = 75  # of JPEG, from 0 to 95: about 5 kB for a photo


def thumbnail(image: "PillowImage.Image") -> str:
    """Return a small picture of `image` as a `data:` URI.

    It is encoded anew, so that nothing else of the file is in the page. Transparent parts become
    white.
    """
    from PIL import Image as PillowImage

    small = image.convert("RGBA" if image.has_transparency_data else "RGB")
    small.thumbnail((_LONGEST, _LONGEST))
    white = PillowImage.new("RGB", small.size, "white")
    white.paste(small, mask=small if small.mode == "RGBA" else None)
    made = BytesIO()
    white.save(made, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(made.getvalue()).decode()}"
