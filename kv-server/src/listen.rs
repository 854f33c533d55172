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
use tokio::time::{sleep, timeout};

/// Connections that may wait to be taken; the system may allow fewer. A short queue would make
/// clients of a sudden crowd wait a second until their system tries again.
const BACKLOG: u32 = 16_384;

/// How long a connection may take to send the head of a request, or stay open without one.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

/// With nobody connected and nobody new for that long after the end was decided, it has come.
const QUIET: Duration = Duration::from_millis(50);

/// Connections are taken and served at most that long after the end was decided: who had
/// connected before gets an answer, if only that it is too late. A connection that is closed
/// before its request was read looks like a crash to its client.
const LATE_LIMIT: Duration = Duration::from_millis(500);

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

/// Serves until `end`, takes who is late, then waits until every connection has its answer.
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
    let late = take_late(&listener, &app, &connections);
    if timeout(LATE_LIMIT, late).await.is_err() {
        tracing::debug!("somebody was connected until the end");
    }
    drop(listener);
    connections.shutdown().await;
}

/// Takes connections until nobody is there or comes, or the system refuses one.
async fn take_late(listener: &TcpListener, app: &Router, connections: &GracefulShutdown) {
    loop {
        match timeout(QUIET, listener.accept()).await {
            Ok(Ok((stream, _))) => connect(stream, app.clone(), connections),
            Err(_) if connections.count() > 0 => {}
            Ok(Err(_)) | Err(_) => break,
        }
    }
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

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use axum::routing::get;

    use super::*;

    /// Virtual time passes only when there is nothing to do, so that no machine is too slow.
    #[tokio::test(start_paused = true)]
    async fn who_connected_before_the_end_is_answered() {
        let listener = listen("127.0.0.1", 0).await.unwrap();
        let mut clients: Vec<_> = (0..20)
            .map(|_| {
                // The system takes connection and request before the server knows of them.
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                client
                    .write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
                    .unwrap();
                client
            })
            .collect();
        let app = Router::new().route("/", get(|| async { "late" }));
        serve(listener, app, ready(())).await;
        for client in &mut clients {
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert!(answer.ends_with("\r\n\r\nlate"), "{answer}");
        }
    }
}
