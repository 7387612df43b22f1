//! Who has sent a request that changes something, and what came of it, for the features: a layer
//! around all handlers of the control socket, so that none is forgotten.

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use fathom_control::{AuditEntry, ErrorCode, ErrorReply};

use super::listen::Peer;
use super::routes::{BODY_REMEDY, Refused};
use crate::daemon::Daemon;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::features::FEATURES;

/// The most bytes of the body of a request.
const BODY_MAX: usize = 2 << 20;
/// The most bytes of the body of an answer that refuses.
const ANSWER_MAX: usize = 1 << 20;
/// The most bytes of each text of an entry.
const TEXT_MAX: usize = 4 << 10;

/// An entry that is noted even if the client goes away before its request has ended.
struct Pending {
    daemon: Arc<Daemon>,
    entry: Option<AuditEntry>,
    begun: Instant,
}

impl Pending {
    fn end(&mut self, status: Option<u16>, error: &str) {
        let Some(mut entry) = self.entry.take() else { return };
        entry.unix_time_ns = unix_time_ns();
        entry.duration_us = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        entry.status = status;
        entry.error = shortened(error);
        for feature in FEATURES {
            feature.requested(&self.daemon, &entry);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.end(None, "the client went away before the answer");
    }
}

/// Carries a request out, and notes it if it changes something.
pub(crate) async fn note(
    State(daemon): State<Arc<Daemon>>,
    request: Request,
    next: Next,
) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map(|peer| peer.0.clone());
    let peer = peer.unwrap_or_default();
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let entry = AuditEntry {
        user_id: peer.user_id,
        process_id: peer.process_id,
        command: peer.command,
        request: shortened(&format!("{} {target}", request.method())),
        ..AuditEntry::default()
    };
    let mut pending = Pending { daemon, entry: Some(entry), begun: Instant::now() };
    let (parts, body) = request.into_parts();
    let response = match to_bytes(body, BODY_MAX).await {
        Ok(body) => {
            if let Some(entry) = &mut pending.entry {
                entry.body = shortened(&String::from_utf8_lossy(&body[..body.len().min(TEXT_MAX)]));
            }
            next.run(Request::from_parts(parts, Body::from(body))).await
        }
        Err(error) => {
            Refused(refusal(ErrorCode::Invalid, error.to_string(), BODY_REMEDY)).into_response()
        }
    };
    let status = response.status();
    if status.is_success() {
        pending.end(Some(status.as_u16()), "");
        return response;
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, ANSWER_MAX).await.unwrap_or_default();
    let reply = serde_json::from_slice::<ErrorReply>(&body);
    let error = reply.map_or_else(|_| "refused".into(), |reply| reply.error.message);
    pending.end(Some(status.as_u16()), &error);
    Response::from_parts(parts, Body::from(body))
}

/// The beginning of a text.
fn shortened(text: &str) -> String {
    let end = (0..=TEXT_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_shortened_between_characters() {
        assert_eq!(shortened("a"), "a");
        let long = "ä".repeat(TEXT_MAX);
        assert_eq!(shortened(&long).len(), TEXT_MAX);
        assert_eq!(shortened(&format!("a{long}")).len(), TEXT_MAX - 1);
    }
}
