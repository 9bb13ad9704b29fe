"""`python -m grpo_mp` is `grpo-mp`."""

from grpo_mp.cli.main import main

raise SystemExit(main())
