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

    small = image.copy()
    small.thumbnail((_LONGEST, _LONGEST))
    if small.has_transparency_data:
        small = small.convert("RGBA")
        white = PillowImage.new("RGBA", small.size, "white")
        small = PillowImage.alpha_composite(white, small)
    made = BytesIO()
    small.convert("RGB").save(made, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(made.getvalue()).decode()}"
