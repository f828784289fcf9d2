"""Exit status 0 where the server of this container answers; SGLang generates a token for it."""

import os
import sys

from hiqcache.direct_http import main

sys.exit(main(f"http://127.0.0.1:{os.environ.get('PORT') or 30000}/health"))
