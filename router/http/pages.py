"""Static files of the router's pages."""

from service.http.pages import CHAT, SHARED, files_of

FILES = SHARED | CHAT | files_of("router.dashboard", "/dashboard")
