# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals`, for environments where the script is not on the path."""

from fedvitals.cli.main import main

if __name__ == "__main__":
    main()
