//! Answers that go on: server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde::Serialize;
use tokio::sync::mpsc;

/// The messages that wait for a slow reader. What comes meanwhile waits, or is left out.
const WAITING_MAX: usize = 4;
/// A comment is sent after this time without a message, so that those who have left are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The messages of an answer.
struct Messages(mpsc::Receiver<Event>);

impl Stream for Messages {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|event| event.map(Ok))
    }
}

/// Where the messages of an answer are put.
#[derive(Clone)]
pub(super) struct Outlet(mpsc::Sender<Event>);

impl Outlet {
    /// Sends a message, when the reader has room for it. Returns whether there is a reader.
    pub(super) async fn send(&self, text: &str) -> bool {
        self.0.send(Event::default().data(text)).await.is_ok()
    }

    /// The same from a thread of its own.
    pub(super) fn send_blocking(&self, text: &str) -> bool {
        self.0.blocking_send(Event::default().data(text)).is_ok()
    }

    /// Waits until there is no reader.
    pub(super) async fn closed(&self) {
        self.0.closed().await;
    }

    /// Sends a value as JSON.
    pub(super) async fn send_json(&self, value: &impl Serialize) -> bool {
        self.send(&serde_json::to_string(value).unwrap_or_default()).await
    }
}

/// An answer, and where its messages are put.
pub(super) fn answer() -> (Outlet, Response) {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    let alive = axum::response::sse::KeepAlive::new().interval(KEEP_ALIVE);
    (Outlet(sender), Sse::new(Messages(receiver)).keep_alive(alive).into_response())
}
