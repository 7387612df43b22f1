//! The page of metrics over TCP.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fathom_frontend::socket::yielding;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::daemon::http::routes::Share;
use crate::daemon::{Daemon, metrics};

/// The most connections at a time. A further one takes the place of the oldest.
const SCRAPERS_MAX: usize = 64;
/// The time limit of a connection.
const SCRAPE_TIME_MAX: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes.
const HEAD_MAX: usize = 8192;

/// Serves only `/metrics` over TCP, with limits on the number of connections and their time.
/// Clients that are slow delay no other: they give up their places.
pub(crate) async fn serve_metrics(listener: TcpListener, daemon: Arc<Daemon>) {
    let workers = Share::of_workers("/metrics");
    // The oldest first.
    let mut scrapers: Vec<(IpAddr, JoinHandle<()>)> = Vec::new();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted at the metrics address");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        scrapers.retain(|(_, scraper)| !scraper.is_finished());
        if scrapers.len() >= SCRAPERS_MAX {
            if let Some(oldest) = yielding(scrapers.iter().map(|(address, _)| *address)) {
                scrapers.remove(oldest).1.abort();
            }
        }
        let (daemon, workers) = (Arc::clone(&daemon), workers.clone());
        let scraper = tokio::spawn(async move {
            let _ = tokio::time::timeout(SCRAPE_TIME_MAX, scrape(&stream, &daemon, &workers)).await;
        });
        scrapers.push((peer.ip(), scraper));
    }
}

async fn scrape(stream: &TcpStream, daemon: &Arc<Daemon>, workers: &Share) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        let mut piece = [0; 1024];
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => head.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if head.len() > HEAD_MAX {
            return Ok(());
        }
    }
    let found = [b"GET /metrics ".as_slice(), b"GET /metrics?"];
    let (status, body) = if found.iter().any(|start| head.starts_with(start)) {
        daemon.check_problems().await;
        let daemon = Arc::clone(daemon);
        match workers.work(move || Ok(metrics::text(&daemon))).await {
            Ok(text) => ("200 OK", text),
            Err(refused) => ("503 Service Unavailable", format!("{refused}\n")),
        }
    } else {
        ("404 Not Found", "only GET /metrics is served here\n".to_owned())
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n\
         {body}",
        metrics::CONTENT_TYPE,
        body.len()
    );
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.writable().await?;
        match stream.try_write(rest) {
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
