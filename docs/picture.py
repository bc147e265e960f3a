"""Makes compare.png, the picture in the README: the top of the page of a comparison of the demo's invented messages.

    python docs/picture.py FOLDER

FOLDER receives the comparison, and a second run takes over what is trained. Chromium photographs the page. The
comparison takes about ten minutes on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).with_name("compare.png")
DATA = Path(__file__).parents[1] / "src" / "milkglass" / "demo" / "data"
SIZE = "1000,914"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    folder = Path(sys.argv[1])
    files = (str(DATA / "tickets_train.jsonl"), "--validation", str(DATA / "tickets_test.jsonl"))
    options = ("--quick", "--out", str(folder))
    command = (sys.executable, "-m", "milkglass.cli.main", "compare", "demo:minilm", *files, *options)
    subprocess.run(command, check=True)
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    page = (folder / "compare.html").resolve().as_uri()
    shot = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}")
    subprocess.run((browser, *shot, f"--screenshot={PICTURE}", page), check=True, capture_output=True)


if __name__ == "__main__":
    main()
