"""`dflash-prep tokenize` measured: what `tokenizing.py` does, under the name of the command.

For whoever imports `tokenize` while this folder is first on the path, this file is the standard library's.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    from tokenizing import main

    main()
else:
    spec = importlib.util.spec_from_file_location("tokenize", Path(sysconfig.get_path("stdlib"), "tokenize.py"))
    sys.modules["tokenize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tokenize"])
