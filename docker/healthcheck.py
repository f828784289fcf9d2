"""Exit status 0 where the server of this container answers; SGLang generates a token for it."""

import os
import sys
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('PORT') or 30000}/health"
try:
    # SGLang itself gives up after 20 s.
    with urllib.request.urlopen(url, timeout=25) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"{url}: {error}")
