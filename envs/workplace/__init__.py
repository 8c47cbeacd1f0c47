"""A simulated office: the policy works with its calendar, mail and customers through tool calls."""
