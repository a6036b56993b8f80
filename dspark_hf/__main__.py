"""`python -m dspark_hf` is the `dspark` command."""

from .cli import main


raise SystemExit(main())
