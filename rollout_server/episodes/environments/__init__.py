"""Environments that come with the project, and adapters for other projects' environments.
`task.env` names one as `module:name`.
Nothing else imports this package.
"""
