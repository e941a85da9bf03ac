select 'event' as kind, e.title, substr(cast(e.starts as text), 1, 10) as day, substr(cast(e.starts as text), 12, 5) as at, e.place as more
from event e
where substr(cast(e.starts as text), 1, 10) >= cast(:day as text)
union all
select 'task', t.title, cast(t.due as text), '', m.sender
from task t
left join mail m on m.id = t.about
where t.status = 'open' and cast(t.due as text) >= cast(:day as text)
order by 3, 4, 2
