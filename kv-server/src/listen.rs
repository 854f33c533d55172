//! Connections: taken as they come, each served by a task of its own, until told to end.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::time::sleep;

/// Connections that may wait to be taken; the system may allow fewer. A short queue would make
/// clients of a sudden crowd wait a second until their system tries again.
const BACKLOG: u32 = 16_384;

/// How long a connection may take to send the head of a request, or stay open without one.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

/// How long no connection is taken after the system refused one, for lack of files or memory.
const REFUSED_WAIT: Duration = Duration::from_millis(100);

/// Listens on the first address of that name that works.
///
/// # Errors
///
/// The name is unknown, or the last of its addresses can't be used.
pub(crate) async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in lookup_host((host, port)).await? {
        match listen_on(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    // A port that is only in the way because old connections linger can be taken again.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `end`, then until every connection has its answer.
pub(crate) async fn serve(listener: TcpListener, app: Router, end: impl Future<Output = ()>) {
    let connections = GracefulShutdown::new();
    tokio::pin!(end);
    loop {
        let taken = tokio::select! {
            taken = listener.accept() => taken,
            () = &mut end => break,
        };
        match taken {
            Ok((stream, _)) => connect(stream, app.clone(), &connections),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be taken");
                sleep(REFUSED_WAIT).await;
            }
        }
    }
    drop(listener);
    connections.shutdown().await;
}

fn connect(stream: TcpStream, app: Router, connections: &GracefulShutdown) {
    // Each token is a small packet of its own; it must not wait for the one before to be
    // acknowledged.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its delay");
    }
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let connection = connections.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
    });
}
