"""What people look at: diagnostics, evaluation, players, the report."""
