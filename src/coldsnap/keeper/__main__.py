"""Where a guard's interpreter starts: ``python -I -S <this file> <descriptor>``.

The one rule: nothing but the standard library and this package is imported. The interpreter runs without ``site``, so
that a slow or broken environment of the caller costs neither time nor the engine; the package's own place is added
last, after the standard library, which nothing there may shadow.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from coldsnap.keeper.guard import main

    main(int(sys.argv[1]))
