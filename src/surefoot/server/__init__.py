"""The HTTP server: OpenAI's and Anthropic's forms over `engine.service.Service`.

`schema` says what requests may hold, `params` turns them into what the engine takes, `choices` turns steps into text,
`openai`, `completions`, `messages` and `responses` put that into each form, `app` ties it together.
"""
