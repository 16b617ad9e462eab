"""What belongs to one run: its folder and identity, its plan, and the job that is put together from both."""
