//! Who may look.
//!
//! The token is in the address that the command prints, or is typed. Afterwards a cookie has it,
//! which the browser sends with requests of the page's own origin alone.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse, Redirect, Response};

use super::assets;
use super::listen::Listener;
use super::routes::Site;

/// Nothing comes from elsewhere, no script is in the text of a page, and no page shows this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];
/// The names by which a browser on this host reaches the page.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// See the module.
pub(super) struct Access {
    /// `None` if who can connect may look.
    token: Option<String>,
    is_encrypted: bool,
    /// Whether the page is for browsers of this host. Then other names in requests come from pages
    /// whose name was made to lead here.
    is_local: bool,
    /// Cookies do not know ports, so that this one has it in its name.
    cookie: String,
}

impl Access {
    pub(super) fn new(token: Option<String>, listener: &Listener) -> Self {
        let cookie = format!("fathom-{}", listener.port());
        let (is_encrypted, is_local) = (listener.is_encrypted(), listener.is_local());
        Self { token, is_encrypted, is_local, cookie }
    }

    /// The address of the page with the token.
    pub(super) fn invitation(&self, address: &str) -> String {
        match &self.token {
            Some(token) => format!("{address}/?token={token}"),
            None => address.to_owned(),
        }
    }

    /// Whether a text is the token. The time that this takes does not depend on where they differ.
    fn is_right(&self, text: &str) -> bool {
        let Some(token) = &self.token else { return true };
        let differs = |(one, other): (u8, u8)| one ^ other;
        let difference = token.bytes().zip(text.bytes()).map(differs).fold(0, |all, one| all | one);
        token.len() == text.len() && difference == 0
    }

    fn has_cookie(&self, headers: &HeaderMap) -> bool {
        let texts = headers.get_all(header::COOKIE).into_iter().filter_map(|it| it.to_str().ok());
        let mut cookies = texts.flat_map(|text| text.split(';'));
        let found = cookies.any(|cookie| {
            let pair = cookie.trim().split_once('=');
            pair.is_some_and(|(name, value)| name == self.cookie && self.is_right(value))
        });
        self.token.is_none() || found
    }

    fn is_for_us(&self, headers: &HeaderMap) -> bool {
        let host =
            headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        !self.is_local || LOCAL.contains(&name)
    }

    /// Leads to the page, with the cookie.
    fn welcome(&self, token: &str) -> Response {
        let secure = if self.is_encrypted { "; Secure" } else { "" };
        let cookie = format!("{}={token}; Path=/; HttpOnly; SameSite=Strict{secure}", self.cookie);
        let mut answer = Redirect::to("/").into_response();
        if let Ok(value) = HeaderValue::from_str(&cookie) {
            answer.headers_mut().insert(header::SET_COOKIE, value);
        }
        answer
    }
}

/// The value of a parameter of a query or of a form. Tokens need no decoding.
fn parameter<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(found, _)| *found == name).map(|(_, value)| value)
}

fn refused(status: StatusCode, text: &'static str) -> Response {
    (status, text).into_response()
}

/// Lets those through who may look, and adds the headers that every answer has.
pub(super) async fn check(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let access = &site.access;
    let path = request.uri().path();
    let is_open = path.starts_with("/assets/") || path == "/login";
    let token = parameter(request.uri().query().unwrap_or_default(), "token");
    let mut answer = if !access.is_for_us(request.headers()) {
        refused(StatusCode::MISDIRECTED_REQUEST, "This page has another name.\n")
    } else if let Some(token) = token.filter(|token| path == "/" && access.is_right(token)) {
        access.welcome(token)
    } else if is_open || access.has_cookie(request.headers()) {
        next.run(request).await
    } else if path == "/" && request.method() == Method::GET {
        Redirect::to("/login").into_response()
    } else {
        refused(StatusCode::UNAUTHORIZED, "Open / first, with the token.\n")
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Asks for the token.
pub(super) async fn ask() -> Html<&'static str> {
    Html(assets::LOGIN)
}

/// The token was typed.
pub(super) async fn log_in(State(site): State<Arc<Site>>, form: String) -> Response {
    match parameter(form.trim(), "token").map(str::trim) {
        Some(token) if site.access.is_right(token) => site.access.welcome(token),
        _ => (StatusCode::FORBIDDEN, Html(assets::LOGIN)).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        let (token, cookie) = (Some("0123456789abcdef".to_owned()), "fathom-1".to_owned());
        Access { token, is_encrypted: false, is_local: true, cookie }
    }

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_the_whole_token_is_right() {
        let access = access();
        assert!(access.is_right("0123456789abcdef"));
        for wrong in ["", "0123456789abcde", "0123456789abcdeF", "0123456789abcdef0"] {
            assert!(!access.is_right(wrong), "{wrong}");
        }
        let cookie = |text: &str| access.has_cookie(&headers(header::COOKIE, text));
        assert!(cookie("a=b; fathom-1=0123456789abcdef"));
        assert!(!cookie("fathom-2=0123456789abcdef") && !cookie("fathom-1=") && !cookie("x"));
        assert!(!access.has_cookie(&HeaderMap::new()));
    }

    #[test]
    fn a_page_of_this_host_has_no_other_name() {
        let access = access();
        let host = |text: &str| access.is_for_us(&headers(header::HOST, text));
        assert!(host("localhost") && host("127.0.0.1:8470") && host("[::1]:8470"));
        assert!(!host("evil.example:8470") && !host("localhost.evil.example") && !host(""));
    }

    #[test]
    fn parameters_are_found() {
        assert_eq!(parameter("a=b&token=xyz", "token"), Some("xyz"));
        assert_eq!(parameter("tokens=xyz", "token"), None);
    }
}
