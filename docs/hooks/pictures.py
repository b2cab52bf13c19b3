"""Make pictures with a dark version follow the site's switch between light and dark.

GitHub chooses between the sources of `<picture>` by its own theme. On the site, `<picture>` would
follow the system instead of the switch, so it becomes two images, of which the theme hides one.
"""

import re

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)"(?P<rest>[^>]*)>\s*</picture>'
)


_IMAGES = (r'<img src="\g<light>#only-light"\g<rest>>', r'<img src="\g<dark>#only-dark"\g<rest>>')


def on_page_markdown(markdown, page, config, files):
    return _PICTURE.sub("\n".join(_IMAGES), markdown)
