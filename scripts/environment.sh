# Sourced by the other scripts: makes .venv, installs the package into it once, and puts it on PATH.
# PYTHON names the interpreter to use (3.10 to 3.13); EXTRAS the extra to install, such as [test].
# In a copy made by 'metaseq-lm examples' the package is installed already.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [ ! -f setup.cfg ]; then
    ${PYTHON:-python} -c 'import metaseq_lm' || {
        echo "activate the environment that metaseq-lm is installed in" >&2
        exit 2
    }
    return
fi
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "Python 3.10 to 3.13 is needed; $python is $("$python" --version). Set PYTHON=..." >&2
    exit 2
}
stamp=.venv/installed${EXTRAS:-}
if [ ! -f "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "== installing into .venv (once; a few minutes)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
        -c constraints.txt -e ".${EXTRAS:-}"
    # On all cores, which pip does not use. Some packages bring files that do not compile; what -x
    # leaves out, a third of all, is hardly imported, and then compiled.
    .venv/bin/python -m compileall -qq -j 0 -x '/tests/|transformers/models/' .venv/lib || true
    touch "$stamp"
fi
export PATH="$root/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # or each of the many processes of the tests compiles the package
