"""Environments that come with the project, and adapters of gyms of others.
`task.env` names one as `module:name`.
Nothing else imports it.
"""
