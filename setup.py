"""Build step beyond setup.cfg: documentation, examples, plug-in and scripts go into the wheel.

They stay at the top of the repository. `metaseq-lm examples DIR` copies them out of an installed
package again.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("docs", "examples", "scripts", "user_dir")
# Need the tests, which are not part of the package.
LEFT_OUT = ("test", "release", "__pycache__")


class BuildWithExamples(build_py):
    """Copies SHIPPED into metaseq_lm/shipped of the build, except for an editable install."""

    def run(self) -> None:
        """Build the package, then add the folders."""
        super().run()
        if getattr(self, "editable_mode", False):
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "metaseq_lm" / "shipped" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns(*LEFT_OUT))


setup(cmdclass={"build_py": BuildWithExamples})
