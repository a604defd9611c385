"""Programs of others in a box: bubblewrap, a service that speaks SandboxFusion's API, or none.
`bubblewrap.py` runs a program.
Code rewards and tasks import it.
"""
