"""The files of the router's pages."""

from service.http.pages import SHARED, files_of

FILES = (
    SHARED
    | files_of("router.web", "/web")
    | files_of("router.dashboard", "/dashboard")
    | files_of("router.chat", "/chat")
)
