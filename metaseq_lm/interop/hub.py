"""Upload of an exported folder to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError


def require_hub(repository: str) -> None:
    """Raise UsageError without the library, a token or a valid name of a repository."""
    library = _hub_library()
    try:
        library.utils.validate_repo_id(repository)
    except library.errors.HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--push {repository}: not the name of a repository ({reason})") from error
    if library.get_token() is None:
        raise UsageError("--push needs a token: 'hf auth login', or HF_TOKEN in the environment")


def push(folder: Path, repository: str, public: bool) -> str:
    """Upload `folder` to a model repository, creating it if necessary, and return its address.

    Raises:
        UsageError: The repository is public, and `public` is false.
        MetaseqError: The Hub cannot be reached, or refuses.
    """
    library = _hub_library()
    api = library.HfApi()
    later = f"; {folder} is whole, 'hf upload {repository} {folder}' uploads it later"
    try:
        address = str(api.create_repo(repository, private=not public, exist_ok=True))
        if not public and not api.repo_info(repository).private:
            raise UsageError(f"--push {repository}: is public; add --public to upload to it{later}")
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Exported by metaseq-lm"
        )
    except MetaseqError:
        raise
    except library.errors.HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise MetaseqError(f"--push {repository}: the Hub refuses ({reason}){later}") from error
    except Exception as error:  # the library's HTTP client may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise MetaseqError(
            f"--push {repository}: the Hub cannot be reached ({reason}){later}"
        ) from error
    return address


def _hub_library() -> Any:
    """Return the module huggingface_hub; UsageError if it is not installed."""
    try:
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise UsageError(
            "--push needs huggingface_hub: pip install 'metaseq-lm[hub]' installs it"
        ) from error
    return huggingface_hub
