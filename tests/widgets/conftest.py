"""JupyterLab in a browser, for the tests of the front end."""

from tests.lab import _lab_page as _lab_page
from tests.lab import lab as lab
from tests.lab import lab_browser as lab_browser
from tests.lab import lab_server as lab_server
